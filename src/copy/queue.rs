//! The state behind the engine's lock: tickets, their progress, their reports. It starts no thread and moves no byte.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::chunk::{Cursor, Segments, CHUNK_BYTES};
use super::error::CopyError;
use super::in_flight::InFlight;
use super::layout::Geometry;
use super::planner::{CopyPlan, Direction};

/// The end of a ticket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// The ticket.
    pub ticket: u64,
    /// Indices of the pairs that did not copy, ascending; what is at their destinations is not defined.
    pub failed: Vec<u32>,
}

/// Counters since the start, and gauges of now (named so).
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct CopyStats {
    /// Tickets accepted.
    pub num_tickets: u64,
    /// Tickets finished, well or badly.
    pub num_finished_tickets: u64,
    /// Tickets refused because the queue was full.
    pub num_refused_tickets: u64,
    /// Pairs of accepted tickets.
    pub num_pairs: u64,
    /// Pairs reported as failed.
    pub num_failed_pairs: u64,
    /// Pieces of accepted tickets: runs times fragments.
    pub num_pieces: u64,
    /// Bytes copied Cpu to Gpu.
    pub load_bytes: u64,
    /// Bytes copied Gpu to Cpu.
    pub store_bytes: u64,
    /// Time that threads spent on loads, all threads added up.
    pub load_time: Duration,
    /// Time that threads spent on stores, all threads added up.
    pub store_time: Duration,
    /// Panics caught in copy threads: bugs, each of which failed a ticket.
    pub num_panics: u64,
    /// Gauge: tickets that wait or run.
    pub queue_depth: usize,
    /// Gauge: finished tickets whose report was not collected.
    pub num_uncollected: usize,
}

/// A plan on its way into the queue.
#[derive(Debug)]
pub(super) struct Submission {
    pub(super) ticket: u64,
    pub(super) plan: CopyPlan,
    pub(super) pairs: Vec<[i32; 2]>,
    pub(super) list: &'static str,
}

/// Work for one thread: at most `CHUNK_BYTES` of a plan from a cursor on.
#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) ticket: u64,
    pub(super) plan: Arc<CopyPlan>,
    pub(super) start: Cursor,
}

/// Failures to come, for tests of what stands above the engine.
#[derive(Debug, Clone, Default)]
struct Fault {
    num_tickets: usize,
    /// Indices of pairs, or all of them.
    pairs: Option<Vec<u32>>,
}

impl Fault {
    fn hits(&self, index: usize) -> bool {
        self.pairs.as_ref().is_none_or(|pairs| pairs.contains(&(index as u32)))
    }
}

#[derive(Debug)]
struct Job {
    plan: Arc<CopyPlan>,
    /// Where the next chunk starts.
    next: Cursor,
    /// Chunks that threads have now.
    running: usize,
    failed: Vec<u32>,
}

#[derive(Debug)]
pub(super) struct Queue {
    jobs: HashMap<u64, Job>,
    /// Tickets with bytes that no thread has taken yet: loads, which requests wait for, before stores.
    waiting: [VecDeque<u64>; 2],
    reports: Vec<Report>,
    in_flight: InFlight,
    faults: [Fault; 2],
    max_queued: usize,
    accepts: bool,
    stats: CopyStats,
}

impl Queue {
    pub(super) fn new(geometry: &Geometry, max_queued: usize) -> Self {
        Self {
            jobs: HashMap::new(),
            waiting: [VecDeque::new(), VecDeque::new()],
            reports: Vec::new(),
            in_flight: InFlight::new(geometry.gpu().num_blocks(), geometry.cpu().num_blocks),
            faults: [Fault::default(), Fault::default()],
            max_queued,
            accepts: true,
            stats: CopyStats::default(),
        }
    }

    /// Takes all submissions, or none.
    pub(super) fn submit(&mut self, new: Vec<Submission>, geometry: &Geometry) -> Result<(), CopyError> {
        if !self.accepts {
            return Err(CopyError::Closed);
        }
        let open = self.jobs.len() + self.reports.len();
        if open + new.len() > self.max_queued {
            self.stats.num_refused_tickets += new.len() as u64;
            return Err(CopyError::QueueFull { open, max_queued: self.max_queued });
        }
        for (position, Submission { ticket, .. }) in new.iter().enumerate() {
            let in_use = self.jobs.contains_key(ticket)
                || self.reports.iter().any(|report| report.ticket == *ticket)
                || new[..position].iter().any(|earlier| earlier.ticket == *ticket);
            if in_use {
                return Err(CopyError::TicketInUse { ticket: *ticket });
            }
        }
        let faults = self.faults.clone();
        let mut accepted: Vec<(u64, Arc<CopyPlan>)> = Vec::with_capacity(new.len());
        for submission in new {
            match self.enter(submission, &accepted, geometry) {
                Ok(job) => accepted.push(job),
                Err(error) => {
                    for (_, plan) in &accepted {
                        self.in_flight.leave(plan);
                    }
                    self.faults = faults;
                    return Err(error);
                }
            }
        }
        for (ticket, plan) in accepted {
            self.accept(ticket, plan, geometry);
        }
        Ok(())
    }

    /// Applies faults to a submission and claims its blocks.
    fn enter(
        &mut self,
        submission: Submission,
        siblings: &[(u64, Arc<CopyPlan>)],
        geometry: &Geometry,
    ) -> Result<(u64, Arc<CopyPlan>), CopyError> {
        let Submission { ticket, mut plan, pairs, list } = submission;
        let direction = plan.direction();
        let fault = &mut self.faults[queue_index(direction)];
        if fault.num_tickets > 0 {
            fault.num_tickets -= 1;
            plan = CopyPlan::new(direction, &pairs, |index| fault.hits(index), geometry, list)?;
        }
        match self.in_flight.enter(&plan) {
            Ok(()) => Ok((ticket, Arc::new(plan))),
            Err(conflict) => {
                let jobs = self.jobs.iter().map(|(&ticket, job)| (ticket, &*job.plan));
                let others = jobs.chain(siblings.iter().map(|(ticket, plan)| (*ticket, &**plan)));
                Err(conflict.describe(&plan, &pairs, list, others))
            }
        }
    }

    fn accept(&mut self, ticket: u64, plan: Arc<CopyPlan>, geometry: &Geometry) {
        self.stats.num_tickets += 1;
        self.stats.num_pairs += (plan.order().len() + plan.skipped().len()) as u64;
        self.stats.num_pieces += plan.num_pieces(geometry) as u64;
        let job = Job { next: Cursor::default(), running: 0, failed: plan.skipped().to_vec(), plan };
        if job.next.is_at_end(&job.plan) {
            self.report(ticket, job);
        } else {
            self.waiting[queue_index(job.plan.direction())].push_back(ticket);
            self.jobs.insert(ticket, job);
        }
    }

    /// The next chunk of the oldest load that has one, else of the oldest store.
    pub(super) fn claim(&mut self, geometry: &Geometry) -> Option<Chunk> {
        let queue = self.waiting.iter_mut().find(|queue| !queue.is_empty())?;
        let ticket = *queue.front()?;
        let job = self.jobs.get_mut(&ticket)?;
        let start = job.next;
        let mut segments = Segments::new(&job.plan, geometry, start, CHUNK_BYTES);
        segments.by_ref().for_each(drop);
        job.next = segments.cursor();
        job.running += 1;
        if job.next.is_at_end(&job.plan) {
            queue.pop_front();
        }
        Some(Chunk { ticket, plan: Arc::clone(&job.plan), start })
    }

    /// Enters the end of a chunk: its bytes, or `None` if the thread panicked, which fails the rest of the ticket too.
    /// Returns whether the ticket is finished.
    pub(super) fn finish(&mut self, chunk: &Chunk, bytes: Option<usize>, time: Duration, geometry: &Geometry) -> bool {
        let Some(job) = self.jobs.get_mut(&chunk.ticket) else { return false };
        job.running -= 1;
        let bytes = if let Some(bytes) = bytes {
            bytes
        } else {
            self.stats.num_panics += 1;
            for segment in Segments::new(&job.plan, geometry, chunk.start, CHUNK_BYTES) {
                job.failed.extend(&job.plan.order()[segment.positions(&job.plan)]);
            }
            job.fail_rest();
            self.waiting[queue_index(job.plan.direction())].retain(|&ticket| ticket != chunk.ticket);
            0
        };
        let (total_bytes, total_time) = match job.plan.direction() {
            Direction::Load => (&mut self.stats.load_bytes, &mut self.stats.load_time),
            Direction::Store => (&mut self.stats.store_bytes, &mut self.stats.store_time),
        };
        *total_bytes += bytes as u64;
        *total_time += time;
        if job.running > 0 || !job.next.is_at_end(&job.plan) {
            return false;
        }
        if let Some(job) = self.jobs.remove(&chunk.ticket) {
            self.in_flight.leave(&job.plan);
            self.report(chunk.ticket, job);
        }
        true
    }

    fn report(&mut self, ticket: u64, job: Job) {
        let mut failed = job.failed;
        failed.sort_unstable();
        failed.dedup();
        self.stats.num_finished_tickets += 1;
        self.stats.num_failed_pairs += failed.len() as u64;
        self.reports.push(Report { ticket, failed });
    }

    /// Takes no more submissions.
    pub(super) fn refuse_new(&mut self) {
        self.accepts = false;
    }

    /// Fails what no thread has taken yet. Chunks that threads have now still end in `finish`.
    pub(super) fn give_up(&mut self) {
        self.refuse_new();
        self.waiting.iter_mut().for_each(VecDeque::clear);
        for job in self.jobs.values_mut() {
            job.fail_rest();
        }
        let mut idle: Vec<u64> =
            self.jobs.iter().filter(|(_, job)| job.running == 0).map(|(&ticket, _)| ticket).collect();
        idle.sort_unstable();
        for ticket in idle {
            if let Some(job) = self.jobs.remove(&ticket) {
                self.in_flight.leave(&job.plan);
                self.report(ticket, job);
            }
        }
    }

    /// The reports so far, in order of completion.
    pub(super) fn take_reports(&mut self) -> Vec<Report> {
        std::mem::take(&mut self.reports)
    }

    pub(super) fn has_reports(&self) -> bool {
        !self.reports.is_empty()
    }

    /// Whether every ticket is finished.
    pub(super) fn is_idle(&self) -> bool {
        self.jobs.is_empty()
    }

    pub(super) fn accepts(&self) -> bool {
        self.accepts
    }

    pub(super) fn inject(&mut self, direction: Direction, pairs: Option<Vec<u32>>, num_tickets: usize) {
        self.faults[queue_index(direction)] = Fault { num_tickets, pairs };
    }

    pub(super) fn stats(&self) -> CopyStats {
        CopyStats { queue_depth: self.jobs.len(), num_uncollected: self.reports.len(), ..self.stats }
    }
}

impl Job {
    /// Fails every pair of which bytes are left that no thread has taken.
    fn fail_rest(&mut self) {
        if let Some(run) = self.plan.runs().get(self.next.run) {
            // From the first unfinished run on, whole runs: within a run the rows of all fragments are interleaved.
            self.failed.extend(&self.plan.order()[run.first as usize..]);
        }
        self.next = Cursor::end(&self.plan);
    }
}

fn queue_index(direction: Direction) -> usize {
    match direction {
        Direction::Load => 0,
        Direction::Store => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::{DescribedMemory, Fragment, HostSlots};
    use super::*;

    const BLOCK: usize = CHUNK_BYTES / 2; // two blocks a chunk

    fn geometry() -> Geometry {
        let fragment = Fragment { address: 0x1000, block_stride: BLOCK, bytes: BLOCK };
        let slots = HostSlots { address: 0x1000_0000_0000, num_blocks: 16, block_bytes: BLOCK, slot_bytes: BLOCK };
        Geometry::new(DescribedMemory::new(vec![fragment], 16).unwrap(), slots).unwrap()
    }

    fn submission(geometry: &Geometry, ticket: u64, direction: Direction, pairs: &[[i32; 2]]) -> Submission {
        let plan = CopyPlan::new(direction, pairs, |_| false, geometry, "pairs").unwrap();
        Submission { ticket, plan, pairs: pairs.to_vec(), list: "pairs" }
    }

    fn finish(queue: &mut Queue, chunk: &Chunk, geometry: &Geometry) -> bool {
        queue.finish(chunk, Some(1), Duration::ZERO, geometry)
    }

    #[test]
    fn loads_go_before_stores_that_wait() {
        let geometry = geometry();
        let mut queue = Queue::new(&geometry, 8);
        queue.submit(vec![submission(&geometry, 1, Direction::Store, &[[0, 0], [1, 1], [2, 2]])], &geometry).unwrap();
        let store = queue.claim(&geometry).unwrap();
        queue.submit(vec![submission(&geometry, 2, Direction::Load, &[[8, 8]])], &geometry).unwrap();
        let load = queue.claim(&geometry).unwrap();
        let rest = queue.claim(&geometry).unwrap();
        assert_eq!([store.ticket, load.ticket, rest.ticket], [1, 2, 1]);
        assert!(queue.claim(&geometry).is_none());
        assert!(!finish(&mut queue, &store, &geometry));
        assert!(finish(&mut queue, &rest, &geometry));
        assert!(finish(&mut queue, &load, &geometry));
        let tickets: Vec<u64> = queue.take_reports().iter().map(|report| report.ticket).collect();
        assert_eq!(tickets, [1, 2]);
    }

    #[test]
    fn a_refused_submission_leaves_nothing_behind() {
        let geometry = geometry();
        let mut queue = Queue::new(&geometry, 3);
        queue.submit(vec![submission(&geometry, 1, Direction::Store, &[[0, 0]])], &geometry).unwrap();
        let before = queue.stats();
        let pair = |a: (u64, Direction, [i32; 2]), b: (u64, Direction, [i32; 2])| {
            vec![submission(&geometry, a.0, a.1, &[a.2]), submission(&geometry, b.0, b.1, &[b.2])]
        };
        let (load, store) = (Direction::Load, Direction::Store);

        let error = queue.submit(pair((2, load, [3, 3]), (3, store, [5, 0])), &geometry).unwrap_err();
        assert_eq!(error.to_string(), "pairs[0] = (5, 0): Cpu block 0 is the destination of ticket 1, still in flight");
        let error = queue.submit(pair((2, load, [3, 3]), (3, store, [5, 3])), &geometry).unwrap_err();
        assert_eq!(error.to_string(), "pairs[0] = (5, 3): Cpu block 3 is the source of ticket 2, still in flight");
        let error = queue.submit(pair((2, load, [3, 3]), (2, store, [5, 5])), &geometry).unwrap_err();
        assert_eq!(error, CopyError::TicketInUse { ticket: 2 });
        let error = queue.submit(pair((2, load, [3, 3]), (1, store, [5, 5])), &geometry).unwrap_err();
        assert_eq!(error, CopyError::TicketInUse { ticket: 1 });
        assert_eq!(queue.stats(), before);

        queue.submit(pair((2, load, [3, 3]), (3, store, [5, 5])), &geometry).unwrap();
        let full = vec![submission(&geometry, 4, load, &[[9, 9]])];
        assert_eq!(queue.submit(full, &geometry), Err(CopyError::QueueFull { open: 3, max_queued: 3 }));
    }

    #[test]
    fn a_report_takes_room_until_it_is_collected() {
        let geometry = geometry();
        let mut queue = Queue::new(&geometry, 1);
        queue.submit(vec![submission(&geometry, 1, Direction::Store, &[])], &geometry).unwrap();
        let again = || vec![submission(&geometry, 1, Direction::Store, &[])];
        assert_eq!(queue.submit(again(), &geometry), Err(CopyError::QueueFull { open: 1, max_queued: 1 }));
        assert_eq!(queue.take_reports(), [Report { ticket: 1, failed: vec![] }]);
        queue.submit(again(), &geometry).unwrap();
    }

    #[test]
    fn a_panic_fails_its_chunk_and_the_rest_of_the_ticket() {
        let geometry = geometry();
        let mut queue = Queue::new(&geometry, 8);
        // Three runs by destination: (6, 0), then (0, 4) .. (3, 7), then (9, 12): the chunk of two starts with (6, 0).
        let pairs = [[9, 12], [0, 4], [1, 5], [2, 6], [3, 7], [6, 0]];
        queue.submit(vec![submission(&geometry, 1, Direction::Store, &pairs)], &geometry).unwrap();
        let chunks = [queue.claim(&geometry).unwrap(), queue.claim(&geometry).unwrap()];
        assert!(!queue.finish(&chunks[1], None, Duration::ZERO, &geometry), "the first chunk still runs");
        assert!(queue.claim(&geometry).is_none(), "nothing more is handed out");
        assert!(finish(&mut queue, &chunks[0], &geometry));
        // The first chunk took (6, 0) and (0, 4), the second (1, 5) and (2, 6). The rest is counted by whole runs.
        assert_eq!(queue.take_reports(), [Report { ticket: 1, failed: vec![0, 1, 2, 3, 4] }]);
        assert_eq!(queue.stats().num_panics, 1);
        queue.submit(vec![submission(&geometry, 2, Direction::Store, &pairs)], &geometry).unwrap();
    }

    #[test]
    fn giving_up_reports_every_ticket() {
        let geometry = geometry();
        let mut queue = Queue::new(&geometry, 8);
        queue.submit(vec![submission(&geometry, 1, Direction::Store, &[[0, 0], [1, 1], [2, 2]])], &geometry).unwrap();
        queue.submit(vec![submission(&geometry, 2, Direction::Store, &[[4, 4]])], &geometry).unwrap();
        let chunk = queue.claim(&geometry).unwrap();
        queue.give_up();
        assert_eq!(queue.take_reports(), [Report { ticket: 2, failed: vec![0] }]);
        assert!(!queue.is_idle(), "a thread still copies");
        assert!(finish(&mut queue, &chunk, &geometry));
        assert_eq!(queue.take_reports(), [Report { ticket: 1, failed: vec![0, 1, 2] }]);
        assert!(queue.is_idle());
        let late = vec![submission(&geometry, 3, Direction::Store, &[[4, 4]])];
        assert_eq!(queue.submit(late, &geometry), Err(CopyError::Closed));
    }

    #[test]
    fn faults_hit_the_next_tickets_of_their_direction_only() {
        let geometry = geometry();
        let mut queue = Queue::new(&geometry, 8);
        queue.inject(Direction::Load, Some(vec![1, 77]), 1);
        queue.submit(vec![submission(&geometry, 1, Direction::Store, &[[0, 0], [1, 1]])], &geometry).unwrap();
        queue.submit(vec![submission(&geometry, 2, Direction::Load, &[[4, 4], [5, 5]])], &geometry).unwrap();
        queue.submit(vec![submission(&geometry, 3, Direction::Load, &[[6, 6], [7, 7]])], &geometry).unwrap();
        while let Some(chunk) = queue.claim(&geometry) {
            finish(&mut queue, &chunk, &geometry);
        }
        let mut reports = queue.take_reports();
        reports.sort_by_key(|report| report.ticket);
        let failed: Vec<Vec<u32>> = reports.into_iter().map(|report| report.failed).collect();
        assert_eq!(failed, [vec![], vec![1], vec![]]);

        queue.inject(Direction::Store, None, 1);
        queue.submit(vec![submission(&geometry, 4, Direction::Store, &[[0, 0], [1, 1]])], &geometry).unwrap();
        assert_eq!(queue.take_reports(), [Report { ticket: 4, failed: vec![0, 1] }]);
    }
}
