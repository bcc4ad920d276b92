//! Python arguments, checked: wrong types are `TypeError`, values outside their limits `ConfigError`.

use std::ops::RangeInclusive;

use pyo3::buffer::{Element, PyBuffer};
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyFloat, PyInt, PyMemoryView, PySequence, PyString, PyTuple};

use super::errors;
use crate::block::BlockHash;
use crate::hash::{Adapter, Field, Identity, Media};
use crate::session::RequestId;

/// An integer that must lie in a range; too large for any machine integer counts as outside.
fn integer(name: &str, value: &Bound<'_, PyAny>, low: i64, high: i64) -> PyResult<i64> {
    let outside = || errors::config(value.py(), name, &text(value), &format!("{low} .. {high}"));
    if value.is_instance_of::<PyBool>() {
        return Err(PyTypeError::new_err(format!("{name}: an int is wanted, not a bool")));
    }
    match value.extract::<i64>() {
        Ok(number) if (low..=high).contains(&number) => Ok(number),
        Ok(_) => Err(outside()),
        Err(error) if error.is_instance_of::<PyOverflowError>(value.py()) => Err(outside()),
        Err(_) => Err(type_error(name, "an int", value)),
    }
}

/// As `integer`, for sizes and counts.
pub(super) fn size(name: &str, value: &Bound<'_, PyAny>, range: RangeInclusive<usize>) -> PyResult<usize> {
    let bound = |end: usize| i64::try_from(end).unwrap_or(i64::MAX);
    let number = integer(name, value, bound(*range.start()), bound(*range.end()))?;
    Ok(number.unsigned_abs() as usize)
}

/// As `size`, without an upper limit of its own.
pub(super) fn count(name: &str, value: &Bound<'_, PyAny>) -> PyResult<usize> {
    size(name, value, 0..=usize::MAX)
}

pub(super) fn text(value: &Bound<'_, PyAny>) -> String {
    let shown = value.repr().map_or_else(|_| "?".to_owned(), |repr| repr.to_string());
    match shown.char_indices().nth(60) {
        Some((cut, _)) => format!("{}…", &shown[..cut]),
        None => shown,
    }
}

pub(super) fn type_error(name: &str, wanted: &str, value: &Bound<'_, PyAny>) -> PyErr {
    let got = value.get_type().name().map_or_else(|_| "?".to_owned(), |name| name.to_string());
    PyTypeError::new_err(format!("{name}: {wanted} is wanted, not {got}"))
}

/// A name that chooses among known ones; which ones, the table knows.
pub(super) fn name(argument: &str, value: Option<&Bound<'_, PyAny>>, default: &str) -> PyResult<String> {
    match value {
        None => Ok(default.to_owned()),
        Some(value) => match value.cast::<PyString>() {
            Ok(name) => utf8(argument, name),
            Err(_) => Err(type_error(argument, "a str", value)),
        },
    }
}

pub(super) fn bytes(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    let bytes = value.cast::<PyBytes>().map_err(|_| type_error(name, "bytes", value))?;
    Ok(bytes.as_bytes().to_vec())
}

/// A ticket number; one that no ticket can have is stale like any other that was never issued.
pub(super) fn ticket(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    match value.extract::<u64>() {
        Ok(number) if !value.is_instance_of::<PyBool>() => Ok(number),
        Err(error) if error.is_instance_of::<PyOverflowError>(value.py()) => Err(errors::never_issued(value)),
        _ => Err(type_error("ticket", "an int", value)),
    }
}

pub(super) fn request_id(value: &Bound<'_, PyAny>) -> PyResult<RequestId> {
    if let Ok(name) = value.cast::<PyString>() {
        return Ok(RequestId::Text(utf8("request_id", name)?.into()));
    }
    // The usual case first: looking for an attribute costs more.
    let is_int = value.is_instance_of::<PyInt>() || value.hasattr("__index__")?;
    if !is_int || value.is_instance_of::<PyBool>() {
        return Err(type_error("request_id", "a str or an int", value));
    }
    integer("request_id", value, i64::MIN, i64::MAX).map(RequestId::Int)
}

/// The text of a str; a lone surrogate, which has no UTF-8 form, is refused.
fn utf8(name: &str, value: &Bound<'_, PyString>) -> PyResult<String> {
    value
        .to_cow()
        .map(std::borrow::Cow::into_owned)
        .map_err(|_| errors::config(value.py(), name, &text(value.as_any()), "text that can be encoded as UTF-8"))
}

const TOKEN_LIMIT: &str = "0 .. 4294967295";

/// Token ids: a sequence of int, or a one-dimensional contiguous buffer of an integer type.
pub(super) fn token_ids(value: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    let py = value.py();
    let out_of_range =
        |index: usize, shown: &str| errors::config(py, &format!("token_ids[{index}]"), shown, TOKEN_LIMIT);
    match integers("token_ids", value)? {
        Integers::Signed(numbers) => numbers
            .into_iter()
            .enumerate()
            .map(|(index, number)| u32::try_from(number).map_err(|_| out_of_range(index, &number.to_string())))
            .collect(),
        Integers::Unsigned(numbers) => numbers
            .into_iter()
            .enumerate()
            .map(|(index, number)| u32::try_from(number).map_err(|_| out_of_range(index, &number.to_string())))
            .collect(),
        Integers::Tokens(tokens) => Ok(tokens),
        Integers::Outside(index, shown) => Err(out_of_range(index, &shown)),
    }
}

/// Indices of pairs; checked against the ticket by the table.
pub(super) fn indices(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<usize>> {
    let py = value.py();
    let negative = |shown: &str| errors::config(py, name, shown, "an index of one of the ticket's pairs");
    match integers(name, value)? {
        Integers::Signed(numbers) => numbers
            .into_iter()
            .map(|number| usize::try_from(number).map_err(|_| negative(&number.to_string())))
            .collect(),
        Integers::Unsigned(numbers) => Ok(numbers.into_iter().map(|number| number as usize).collect()),
        Integers::Tokens(numbers) => Ok(numbers.into_iter().map(|number| number as usize).collect()),
        Integers::Outside(_, shown) => Err(negative(&shown)),
    }
}

enum Integers {
    Signed(Vec<i64>),
    Unsigned(Vec<u64>),
    Tokens(Vec<u32>),
    /// Position and text of one that fits no machine integer.
    Outside(usize, String),
}

fn integers(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Integers> {
    if value.is_instance_of::<PyString>() {
        return Err(type_error(name, "a sequence or buffer of integers", value));
    }
    // Lists and tuples, the common case, have no buffer; asking costs an exception.
    if !value.is_instance_of::<pyo3::types::PyList>() && !value.is_instance_of::<PyTuple>() {
        if let Some(numbers) = integer_buffer(name, value)? {
            return Ok(numbers);
        }
    }
    let num_items = sequence_length(name, "a sequence or buffer of integers", value)?;
    let mut numbers = Vec::with_capacity(num_items.min(TRUSTED_LENGTH));
    for (index, item) in value.try_iter()?.take(num_items).enumerate() {
        let item = item?;
        match item.extract::<i64>() {
            Ok(_) if item.is_instance_of::<PyBool>() => {
                return Err(type_error(&format!("{name}[{index}]"), "an int", &item))
            }
            Ok(number) => numbers.push(number),
            Err(error) if error.is_instance_of::<PyOverflowError>(value.py()) => {
                return Ok(Integers::Outside(index, text(&item)));
            }
            Err(_) => return Err(type_error(&format!("{name}[{index}]"), "an int", &item)),
        }
    }
    Ok(Integers::Signed(numbers))
}

/// Longest sequence or buffer that one call takes.
const MAX_ITEMS: usize = 1 << 26;
/// Up to here a claimed length is believed before the items have been seen.
const TRUSTED_LENGTH: usize = 1 << 16;

fn check_length(name: &str, value: &Bound<'_, PyAny>, num_items: usize) -> PyResult<()> {
    if num_items > MAX_ITEMS {
        return Err(errors::config(value.py(), name, &format!("{num_items} items"), &format!("at most {MAX_ITEMS}")));
    }
    Ok(())
}

/// Items of a sequence: not of an iterator, which may have no end, nor of a set, which has no order.
fn sequence_length(name: &str, wanted: &str, value: &Bound<'_, PyAny>) -> PyResult<usize> {
    let sequence = value.cast::<PySequence>().map_err(|_| type_error(name, wanted, value))?;
    let num_items = sequence.len()?;
    check_length(name, value, num_items)?;
    Ok(num_items)
}

/// First characters of the buffer formats of the other byte order.
const FOREIGN: &[char] = if cfg!(target_endian = "little") { &['>', '!'] } else { &['<'] };

fn integer_buffer(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Option<Integers>> {
    let py = value.py();
    // Integers of the other byte order pass for native ones where only size and sign are compared.
    let is_foreign = PyMemoryView::from(value)
        .and_then(|view| view.getattr("format")?.extract::<String>())
        .is_ok_and(|format| format.starts_with(FOREIGN));
    macro_rules! read {
        ($($kind:ty => $variant:ident),*) => {$(
            if let (false, Ok(buffer)) = (is_foreign, PyBuffer::<$kind>::get(value)) {
                let numbers = contiguous(name, value, &buffer)?;
                return Ok(Some(Integers::$variant(numbers.into_iter().map(Into::into).collect())));
            }
        )*};
    }
    read!(i64 => Signed, i32 => Signed, u32 => Tokens, u64 => Unsigned, u16 => Tokens, i16 => Signed, u8 => Tokens, i8 => Signed);
    if PyMemoryView::from(value).is_ok() {
        let dtype = value.getattr("dtype").map_or_else(|_| "not integers".to_owned(), |dtype| dtype.to_string());
        return Err(errors::config(py, name, &format!("a buffer of {dtype}"), "a buffer of native-endian integers"));
    }
    Ok(None)
}

fn contiguous<T: Element + Copy>(name: &str, value: &Bound<'_, PyAny>, buffer: &PyBuffer<T>) -> PyResult<Vec<T>> {
    if buffer.dimensions() != 1 || !buffer.is_c_contiguous() {
        let what = format!("a buffer of shape {:?}, strides {:?}", buffer.shape(), buffer.strides());
        return Err(errors::config(value.py(), name, &what, "one dimension, contiguous"));
    }
    check_length(name, value, buffer.item_count())?;
    buffer.to_vec(value.py())
}

/// Block hashes: a contiguous byte buffer of 32 bytes each, or a sequence of 32-byte `bytes`.
pub(super) fn digests(value: &Bound<'_, PyAny>) -> PyResult<Vec<BlockHash>> {
    let py = value.py();
    let wrong = |shown: String, limit| errors::config(py, "digests", &shown, limit);
    if value.is_instance_of::<PyString>() {
        return Err(type_error("digests", "bytes", value));
    }
    let split = |bytes: &[u8]| {
        let shown = || format!("{} bytes", bytes.len());
        BlockHash::split(bytes).ok_or_else(|| wrong(shown(), "a multiple of 32 bytes, one hash per block"))
    };
    // The common case needs no view.
    if let Ok(bytes) = value.cast::<PyBytes>() {
        return split(bytes.as_bytes());
    }
    if !value.is_instance_of::<pyo3::types::PyList>() && !value.is_instance_of::<PyTuple>() {
        if let Ok(view) = PyMemoryView::from(value) {
            if !view.getattr("c_contiguous")?.extract::<bool>()? {
                return Err(wrong("a buffer with gaps".to_owned(), "a contiguous buffer"));
            }
            let item_bytes: usize = view.getattr("itemsize")?.extract()?;
            if item_bytes != 1 {
                return Err(wrong(format!("a buffer of {item_bytes}-byte items"), "a buffer of bytes"));
            }
            let bytes: Vec<u8> = view.call_method0("tobytes")?.extract()?;
            return split(&bytes);
        }
    }
    let num_items = sequence_length("digests", "a buffer or a sequence of bytes", value)?;
    let mut hashes = Vec::with_capacity(num_items.min(TRUSTED_LENGTH));
    for (index, item) in value.try_iter()?.take(num_items).enumerate() {
        let item = item?;
        let name = || format!("digests[{index}]");
        let bytes = item.cast::<PyBytes>().map_err(|_| type_error(&name(), "bytes", &item))?.as_bytes();
        let hash = <[u8; 32]>::try_from(bytes)
            .map_err(|_| errors::config(py, &name(), &format!("{} bytes", bytes.len()), "32 bytes"))?;
        hashes.push(BlockHash(hash));
    }
    Ok(hashes)
}

fn field(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Field> {
    if let Ok(text) = value.cast::<PyString>() {
        return Ok(Field::Bytes(utf8(name, text)?.into_bytes()));
    }
    if let Ok(bytes) = value.cast::<PyBytes>() {
        return Ok(Field::Bytes(bytes.as_bytes().to_vec()));
    }
    if value.is_instance_of::<PyBool>() || value.is_instance_of::<PyFloat>() {
        return Err(type_error(name, "str, bytes or int", value));
    }
    match value.extract::<i128>() {
        Ok(number) => Ok(Field::Int(number)),
        Err(error) if error.is_instance_of::<PyOverflowError>(value.py()) => {
            Err(errors::config(value.py(), name, &text(value), "an integer of 128 bits, signed"))
        }
        Err(_) => Err(type_error(name, "str, bytes or int", value)),
    }
}

/// What, besides its tokens, makes a request's blocks its own.
pub(super) fn identity(
    salt: Option<&Bound<'_, PyAny>>,
    adapter: Option<&Bound<'_, PyAny>>,
    media: Option<&Bound<'_, PyAny>>,
) -> PyResult<Identity> {
    let adapter = match adapter {
        None => Adapter::Base,
        Some(value) => match value.cast::<PyTuple>() {
            Ok(fields) => Adapter::Many(fields.iter().map(|item| field("adapter", &item)).collect::<PyResult<_>>()?),
            Err(_) => Adapter::One(field("adapter", value)?),
        },
    };
    let media = match media {
        None => Vec::new(),
        Some(items) => {
            let wanted = "a sequence of (hash, offset)";
            if items.is_instance_of::<PyString>() || items.is_instance_of::<PyBytes>() {
                return Err(type_error("media", wanted, items));
            }
            let num_items = sequence_length("media", wanted, items)?;
            items.try_iter()?.take(num_items).map(|item| media_item(&item?)).collect::<PyResult<_>>()?
        }
    };
    Ok(Identity { salt: salt.map(|value| field("salt", value)).transpose()?, adapter, media })
}

fn media_item(item: &Bound<'_, PyAny>) -> PyResult<Media> {
    let pair = item.cast::<PyTuple>().ok().filter(|pair| pair.len() == 2);
    let pair = pair.ok_or_else(|| type_error("media", "a sequence of (hash, offset) tuples", item))?;
    let hash = field("media hash", &pair.get_item(0)?)?;
    Ok(Media { hash, offset: count("media offset", &pair.get_item(1)?)? })
}
