//! Tickets: copies in flight, acknowledged by any thread.
//!
//! A session owns a fixed array of cells. It fills a free cell and opens it; completers acknowledge it, one per rank;
//! the last of them carries the outcome into the tiers and marks the cell finished; the session collects it. A rank first
//! *begins* to acknowledge, by a compare-and-swap on a word that has the ticket's number in it: this cannot succeed on
//! another ticket that the cell has been reused for, and since a ticket is finished only when every rank is *done*, the
//! cell cannot be reused between a rank's begin and done.

use crate::block::{CpuBlockId, GpuBlockId};
use crate::error::{Error, Result};
use crate::session::RequestRef;
use crate::sync::{at_least_zero, AcqRel, Acquire, AtomicI64, AtomicU64, OrderedCell, Relaxed, Release};

/// Most ranks that a ticket can wait for.
pub const MAX_RANKS: usize = 32;

/// Most tickets of one session that can be open at a time; a step that finds no room plans its copies later.
const MAX_OPEN: usize = 4096;

/// One load under a ticket.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Load {
    pub(crate) source: CpuBlockId,
    pub(crate) destination: GpuBlockId,
    /// Of the destination.
    pub(crate) generation: u32,
    pub(crate) owner: RequestRef,
}

/// One store under a ticket.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Store {
    pub(crate) source: GpuBlockId,
    /// Of the source.
    pub(crate) generation: u32,
    pub(crate) destination: CpuBlockId,
}

/// The copies under one ticket, of one kind; the other list is empty. The lists keep their memory from ticket to ticket.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    pub(crate) loads: Vec<Load>,
    pub(crate) stores: Vec<Store>,
    /// How many blocks the Cpu tier had withdrawn before the sources of these loads were held.
    pub(crate) num_withdrawn_before: u64,
    /// A bit per pair that failed on any rank.
    failed: Vec<AtomicU64>,
}

impl Copies {
    pub(crate) fn len(&self) -> usize {
        self.loads.len() + self.stores.len()
    }

    pub(crate) fn has_failed(&self, pair: usize) -> bool {
        // Relaxed: set before the rank was done, which the reader comes after.
        self.failed[pair / 64].load(Relaxed) & 1 << (pair % 64) != 0
    }

    /// The loads request by request: where they start, and how many before the first failed one came through.
    pub(crate) fn loads_by_request(&self) -> impl Iterator<Item = LoadsOfRequest<'_>> {
        let mut start = 0;
        self.loads.chunk_by(|a, b| a.owner == b.owner).map(move |loads| {
            let num_good = (start..start + loads.len()).take_while(|&pair| !self.has_failed(pair)).count();
            start += loads.len();
            LoadsOfRequest { loads, num_good }
        })
    }
}

/// The loads of one request under a ticket.
pub(crate) struct LoadsOfRequest<'a> {
    pub(crate) loads: &'a [Load],
    /// Loads before the first failed one.
    pub(crate) num_good: usize,
}

#[derive(Debug, Default)]
struct Cell {
    /// Number and phase of the ticket.
    state: AtomicU64,
    /// Lower half of the number, and a bit per rank that has begun to acknowledge.
    begun: AtomicU64,
    /// A bit per rank that is done.
    done: AtomicU64,
    copies: OrderedCell<Copies>,
}

const FREE: u64 = 0;

fn open(number: u64) -> u64 {
    number << 1
}

fn finished(number: u64) -> u64 {
    number << 1 | 1
}

/// The tickets of one session.
#[derive(Debug)]
pub(crate) struct Tickets {
    cells: Box<[Cell]>,
    ranks: u32,
    next: AtomicU64,
    num_open: AtomicI64,
    /// Tickets finished so far; the session compares it with those it has collected.
    num_finished: AtomicU64,
}

/// The right to carry a ticket's outcome into the tiers: every rank is done.
pub(crate) struct Outcome<'a> {
    tickets: &'a Tickets,
    cell: &'a Cell,
    number: u64,
}

impl Tickets {
    /// No tickets; `max_open` is the most that the caller could ever need.
    pub(crate) fn new(ranks: u32, max_open: usize) -> Self {
        let len = max_open.clamp(2, MAX_OPEN).next_power_of_two();
        Self {
            cells: (0..len).map(|_| Cell::default()).collect(),
            ranks,
            next: AtomicU64::new(1),
            num_open: AtomicI64::new(0),
            num_finished: AtomicU64::new(0),
        }
    }

    pub(crate) fn num_open(&self) -> usize {
        // Relaxed: a statistic.
        at_least_zero(self.num_open.load(Relaxed))
    }

    pub(crate) fn num_finished(&self) -> u64 {
        // Acquire: what was finished can be collected.
        self.num_finished.load(Acquire)
    }

    fn cell(&self, number: u64) -> &Cell {
        &self.cells[number as usize & (self.cells.len() - 1)]
    }

    /// Opens a ticket for what `fill` writes; none if it writes nothing, or if there is no free cell (then it is not
    /// called). Only for the session.
    pub(crate) fn issue(&self, fill: impl FnOnce(u64, &mut Copies)) -> Option<u64> {
        // Relaxed: only the session changes the number.
        let next = self.next.load(Relaxed);
        // A number whose cell is taken by an old ticket is passed over.
        let number = (next..next + self.cells.len() as u64).find(|&number| {
            // Acquire: what the cell was used for before is over.
            self.cell(number).state.load(Acquire) == FREE
        })?;
        let cell = self.cell(number);
        // SAFETY: a free cell is the session's alone: completers touch a cell's copies only after beginning on the
        // ticket that is open in it, and they were all done before the session freed it.
        let num_pairs = unsafe {
            cell.copies.with_mut(|copies| {
                copies.loads.clear();
                copies.stores.clear();
                fill(number, copies);
                let num_words = copies.len().div_ceil(64);
                copies.failed.clear();
                copies.failed.resize_with(num_words, AtomicU64::default);
                copies.len()
            })
        };
        if num_pairs == 0 {
            return None;
        }
        // Relaxed: published by `begun`.
        cell.done.store(0, Relaxed);
        cell.state.store(open(number), Relaxed);
        self.next.store(number + 1, Relaxed);
        self.num_open.fetch_add(1, Relaxed);
        // Release: a rank that begins on this number sees the copies and everything above.
        cell.begun.store(number << 32, Release);
        Some(number)
    }

    /// A rank says which pairs it failed to copy. The outcome, if it was the last rank.
    pub(crate) fn acknowledge(&self, number: u64, rank: u32, failed: &[usize]) -> Result<Option<Outcome<'_>>> {
        if rank >= self.ranks {
            return Err(Error::config("rank", rank, format!("0 .. {}", self.ranks - 1)));
        }
        let cell = self.cell(number);
        self.begin(cell, number, rank)?;
        // SAFETY: this rank has begun on the ticket: its copies were written before, and are not written again before
        // this rank is done.
        let checked = unsafe {
            cell.copies.with(|copies| {
                if let Some(index) = failed.iter().find(|&&index| index >= copies.len()) {
                    let limit = format!("an index of one of the ticket's {} pairs", copies.len());
                    return Err(Error::config("failed", index, limit));
                }
                for &index in failed {
                    // Relaxed: published by `done`.
                    copies.failed[index / 64].fetch_or(1 << (index % 64), Relaxed);
                }
                Ok(())
            })
        };
        if let Err(error) = checked {
            // Release: the rank may begin again.
            cell.begun.fetch_and(!(1 << rank), Release);
            return Err(error);
        }
        // AcqRel: publishes this rank's failures, and shows the last rank those of the others.
        let done = cell.done.fetch_or(1 << rank, AcqRel) | 1 << rank;
        Ok((done.count_ones() == self.ranks).then_some(Outcome { tickets: self, cell, number }))
    }

    fn begin(&self, cell: &Cell, number: u64, rank: u32) -> Result<()> {
        // Relaxed: the numbers only grow; a number at or above was not issued when we looked.
        let was_issued = number > 0 && number < self.next.load(Relaxed);
        let stale = |reason| Err(Error::StaleTicket { ticket: number, reason });
        if !was_issued {
            return stale("it was never issued");
        }
        // Acquire: with the exchange below.
        let mut begun = cell.begun.load(Acquire);
        loop {
            // Relaxed: `begun` is what decides; this only tells the reasons apart.
            let is_open = cell.state.load(Relaxed) == open(number);
            if begun >> 32 != number & 0xffff_ffff || !is_open {
                return stale("it is already finished");
            }
            if begun & 1 << rank != 0 {
                return stale("this rank has acknowledged it before");
            }
            // AcqRel: acquire shows the copies that the session wrote. Acquire on failure: to look again.
            match cell.begun.compare_exchange_weak(begun, begun | 1 << rank, AcqRel, Acquire) {
                Ok(_) => return Ok(()),
                Err(seen) => begun = seen,
            }
        }
    }

    /// Gives the copies of a finished ticket to `settle`, and frees its cell. False if it is not finished yet.
    /// Only for the session.
    pub(crate) fn collect(&self, number: u64, settle: impl FnOnce(&Copies)) -> bool {
        let cell = self.cell(number);
        // Acquire: the outcome has been carried into the tiers.
        if cell.state.load(Acquire) != finished(number) {
            return false;
        }
        // SAFETY: finished: every rank is done, and only the session writes the copies.
        unsafe { cell.copies.with(settle) };
        // Release: whoever opens the cell again comes after.
        cell.state.store(FREE, Release);
        true
    }

    /// Reads the copies of an open or finished ticket. Only for the session.
    pub(crate) fn read<R>(&self, number: u64, read: impl FnOnce(&Copies) -> R) -> R {
        // SAFETY: only the session writes the copies of its tickets, and it is the caller.
        unsafe { self.cell(number).copies.with(read) }
    }
}

impl Outcome<'_> {
    /// Reads the copies.
    pub(crate) fn copies<R>(&self, read: impl FnOnce(&Copies) -> R) -> R {
        // SAFETY: the ticket is not finished before `finish`, and until then nobody writes its copies.
        unsafe { self.cell.copies.with(read) }
    }

    /// Says that the outcome is in the tiers.
    pub(crate) fn finish(self) {
        // Relaxed: a statistic.
        self.tickets.num_open.fetch_sub(1, Relaxed);
        // Release: who sees the ticket finished sees the outcome.
        self.cell.state.store(finished(self.number), Release);
        // Release: counted after.
        self.tickets.num_finished.fetch_add(1, Release);
    }
}
