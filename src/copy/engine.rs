//! The copy engine: threads that take chunks from the queue and copy them, with the processor, between two memories.

use std::panic::{catch_unwind, AssertUnwindSafe};
use std::process;
use std::ptr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::arena::HostArena;
use super::chunk::{Segments, CHUNK_BYTES};
use super::error::CopyError;
use super::layout::{DescribedMemory, Geometry};
use super::planner::{CopyPlan, Direction};
use super::queue::{Chunk, CopyStats, Queue, Report, Submission};

/// Most threads of one engine.
pub const MAX_THREADS: usize = 64;
/// Most tickets that one engine can be told to queue.
pub const MAX_QUEUED: usize = 1 << 20;
/// How long dropping an engine waits for its threads; each has at most one chunk to end.
pub const DROP_TIMEOUT: Duration = Duration::from_secs(2);

const STACK_BYTES: usize = 256 << 10;

/// How to run an engine.
#[derive(Debug, Clone, Copy)]
pub struct CopyOptions {
    /// Threads that copy, `1 ..= MAX_THREADS`.
    pub num_threads: usize,
    /// Most tickets in the engine, from submission until the report is collected, `1 ..= MAX_QUEUED`.
    pub max_queued: usize,
}

impl Default for CopyOptions {
    fn default() -> Self {
        Self { num_threads: 1, max_queued: 1024 }
    }
}

/// One list of copies under one ticket.
#[derive(Debug, Clone)]
pub struct CopyRequest {
    /// Number that the report will bear; not in use in the engine.
    pub ticket: u64,
    /// Which way the bytes go.
    pub direction: Direction,
    /// (source block id, destination block id).
    pub pairs: Vec<[i32; 2]>,
    /// What the caller calls the list, for errors.
    pub list: &'static str,
}

#[derive(Debug)]
struct State {
    queue: Queue,
    stopping: bool,
    live_threads: usize,
}

impl State {
    fn is_finished(&self) -> bool {
        !self.queue.accepts() && self.queue.is_idle()
    }
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// There may be a chunk to take, or a reason to end.
    work: Condvar,
    /// A ticket has finished, or a thread has ended.
    news: Condvar,
    geometry: Geometry,
    /// Held so that no thread can outlive the memory it copies to.
    _arena: Arc<HostArena>,
    #[cfg(test)]
    before_chunk: Mutex<Option<fn(u64)>>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing is left half-done when a panic passes through the lock: copying happens outside of it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Copies blocks between the engine's memory and host memory on its own threads.
///
/// Tickets are not ordered among each other: a copy that needs the result of another is submitted after the other's
/// report, and a block of an unfinished copy is refused to others. Loads go before stores that wait.
#[derive(Debug)]
pub struct CopyEngine {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    owner: u32,
}

impl CopyEngine {
    /// Starts the threads.
    ///
    /// # Safety
    /// The memory that `gpu` describes stays allocated and is not unmapped until [`CopyEngine::stop`] has returned
    /// true, or, if it never does, for the rest of the process. Nobody writes a block that a copy reads, nor touches a
    /// block that a copy writes, until its report.
    pub unsafe fn start(gpu: DescribedMemory, cpu: Arc<HostArena>, options: CopyOptions) -> Result<Self, CopyError> {
        for (argument, value, limit) in
            [("num_threads", options.num_threads, MAX_THREADS), ("max_queued", options.max_queued, MAX_QUEUED)]
        {
            if !(1..=limit).contains(&value) {
                return Err(CopyError::config(argument, value, format!("1 .. {limit}")));
            }
        }
        let geometry = Geometry::new(gpu, cpu.slots())?;
        let state = State { queue: Queue::new(&geometry, options.max_queued), stopping: false, live_threads: 0 };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            work: Condvar::new(),
            news: Condvar::new(),
            geometry,
            _arena: cpu,
            #[cfg(test)]
            before_chunk: Mutex::new(None),
        });
        let engine = Self { shared, threads: Mutex::new(Vec::new()), owner: process::id() };
        for index in 0..options.num_threads {
            engine.spawn(index, options.num_threads)?;
        }
        Ok(engine)
    }

    fn spawn(&self, index: usize, num_threads: usize) -> Result<(), CopyError> {
        let shared = Arc::clone(&self.shared);
        let builder = thread::Builder::new().name(format!("kvtier-copy-{index}")).stack_size(STACK_BYTES);
        self.shared.lock().live_threads += 1;
        match builder.spawn(move || run(&shared)) {
            Ok(handle) => {
                self.threads.lock().unwrap_or_else(PoisonError::into_inner).push(handle);
                Ok(())
            }
            Err(error) => {
                self.shared.lock().live_threads -= 1;
                Err(CopyError::Spawn { index, num_threads, reason: error.to_string() })
            }
        }
    }

    /// The described memory of both sides.
    pub fn geometry(&self) -> &Geometry {
        &self.shared.geometry
    }

    /// Queues all requests or, with an error, none. Never blocks on a copy.
    pub fn submit(&self, requests: Vec<CopyRequest>) -> Result<(), CopyError> {
        self.check_process()?;
        let submissions = requests
            .into_iter()
            .map(|CopyRequest { ticket, direction, pairs, list }| {
                let plan = CopyPlan::new(direction, &pairs, |_| false, &self.shared.geometry, list)?;
                Ok(Submission { ticket, plan, pairs, list })
            })
            .collect::<Result<Vec<_>, CopyError>>()?;
        let mut state = self.shared.lock();
        state.queue.submit(submissions, &self.shared.geometry)?;
        let has_reports = state.queue.has_reports();
        drop(state);
        self.shared.work.notify_all();
        if has_reports {
            self.shared.news.notify_all(); // a list without a pair to copy is finished at once
        }
        Ok(())
    }

    /// The reports since the last call, in order of completion. Never blocks on a copy.
    pub fn poll(&self) -> Result<Vec<Report>, CopyError> {
        self.check_process()?;
        Ok(self.shared.lock().queue.take_reports())
    }

    /// As `poll`, but waits for the first report, at most `timeout`. A closed engine with nothing left returns at once.
    pub fn wait(&self, timeout: Duration) -> Result<Vec<Report>, CopyError> {
        self.check_process()?;
        let state = self.wait_until(timeout, |state| state.queue.has_reports() || state.is_finished());
        Ok({ state }.queue.take_reports())
    }

    /// Refuses further submissions; what is queued goes on.
    pub fn refuse_new(&self) -> Result<(), CopyError> {
        self.check_process()?;
        self.shared.lock().queue.refuse_new();
        Ok(())
    }

    /// Waits, at most `timeout`, until every ticket is finished; returns whether they are.
    pub fn wait_idle(&self, timeout: Duration) -> Result<bool, CopyError> {
        self.check_process()?;
        Ok(self.wait_until(timeout, |state| state.queue.is_idle()).queue.is_idle())
    }

    /// Tells the threads to end after the chunk they have, and fails what no thread has begun. Does not wait.
    pub fn request_stop(&self) {
        if self.check_process().is_ok() {
            let mut state = self.shared.lock();
            state.stopping = true;
            state.queue.give_up();
            drop(state);
            self.shared.work.notify_all();
            self.shared.news.notify_all();
        }
    }

    /// As `request_stop`, then waits, at most `timeout`, until the threads have ended; returns whether they have.
    ///
    /// In a forked child, which has no threads, true at once.
    pub fn stop(&self, timeout: Duration) -> bool {
        if self.check_process().is_err() {
            return true;
        }
        self.request_stop();
        // A thread that has ended still has to leave the library: joining it takes no time worth a bound.
        if self.wait_until(timeout, |state| state.live_threads == 0).live_threads > 0 {
            return false;
        }
        for handle in self.threads.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            // A panic outside of a chunk has already left its message; there is nothing to add to it.
            drop(handle.join());
        }
        true
    }

    /// Whether submissions are refused and every ticket is finished: there will be no further report.
    pub fn is_finished(&self) -> Result<bool, CopyError> {
        self.check_process()?;
        Ok(self.shared.lock().is_finished())
    }

    /// Counters and gauges.
    pub fn stats(&self) -> Result<CopyStats, CopyError> {
        self.check_process()?;
        Ok(self.shared.lock().queue.stats())
    }

    /// Makes pairs of the next `num_tickets` tickets of a direction fail: those at these indices, or all of them.
    ///
    /// They are reported as failed and their bytes are not copied. Replaces what was injected for the direction before.
    pub fn inject_failures(
        &self,
        direction: Direction,
        pairs: Option<Vec<u32>>,
        num_tickets: usize,
    ) -> Result<(), CopyError> {
        self.check_process()?;
        self.shared.lock().queue.inject(direction, pairs, num_tickets);
        Ok(())
    }

    fn wait_until(&self, timeout: Duration, done: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        let waited = self.shared.news.wait_timeout_while(self.shared.lock(), timeout, |state| !done(state));
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// To be asked before the lock: in a forked child a thread that no longer exists may hold it for ever.
    fn check_process(&self) -> Result<(), CopyError> {
        let current = process::id();
        if current == self.owner {
            return Ok(());
        }
        Err(CopyError::Forked { owner: self.owner, current })
    }
}

impl Drop for CopyEngine {
    fn drop(&mut self) {
        // Threads that do not end in time keep what they use through `Shared`; the caller keeps the described memory.
        self.stop(DROP_TIMEOUT);
    }
}

/// What each thread runs.
fn run(shared: &Shared) {
    block_signals();
    let mut state = shared.lock();
    loop {
        if let Some(chunk) = state.queue.claim(&shared.geometry) {
            drop(state);
            let start = Instant::now();
            // Whatever happens to a chunk, its ticket is reported.
            let copied = catch_unwind(AssertUnwindSafe(|| copy(&chunk, shared)));
            let time = start.elapsed();
            state = shared.lock();
            if state.queue.finish(&chunk, copied.ok(), time, &shared.geometry) {
                shared.news.notify_all();
            }
        } else if state.stopping {
            break;
        } else {
            state = shared.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
    state.live_threads -= 1;
    drop(state);
    shared.news.notify_all();
}

/// Copies a chunk and returns its bytes.
fn copy(chunk: &Chunk, shared: &Shared) -> usize {
    #[cfg(test)]
    {
        let before = *shared.before_chunk.lock().unwrap_or_else(PoisonError::into_inner);
        before.inspect(|before| before(chunk.ticket));
    }
    let mut segments = Segments::new(&chunk.plan, &shared.geometry, chunk.start, CHUNK_BYTES);
    for segment in segments.by_ref() {
        let mut piece = segment.piece;
        if piece.is_flat() {
            piece.row_bytes *= piece.num_rows;
            piece.num_rows = 1;
        }
        for row in 0..piece.num_rows {
            let source = ptr::with_exposed_provenance::<u8>(piece.source + row * piece.source_stride);
            let destination =
                ptr::with_exposed_provenance_mut::<u8>(piece.destination + row * piece.destination_stride);
            // SAFETY: both rows are inside memory that the caller of `start` vouched for (described memory) or that
            // `shared` holds (arena): the planner checked the ids, the layout the arithmetic. The sides are apart
            // (`Geometry::new`), so the rows do not overlap. No other chunk has the destination: the plan names each
            // once, fragments are apart, and `InFlight` keeps other plans away.
            unsafe { ptr::copy_nonoverlapping(source, destination, piece.row_bytes) };
        }
    }
    segments.bytes()
}

/// Signals go to the threads of the program: a copy thread would swallow the wake-up that a blocked call waits for.
fn block_signals() {
    // SAFETY: the set is initialised by sigfillset before it is read, and only the calling thread's mask changes.
    unsafe {
        let mut set = std::mem::zeroed::<libc::sigset_t>();
        libc::sigfillset(&raw mut set);
        // A fault in this thread must still end the process as a fault.
        for signal in [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL] {
            libc::sigdelset(&raw mut set, signal);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const set, ptr::null_mut());
    }
}

#[cfg(test)]
mod tests;
