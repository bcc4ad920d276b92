//! The random calls.

/// One call of the harness. Numbers that choose among live requests or open tickets are taken modulo their count.
#[derive(Debug, Clone)]
pub(crate) enum Op {
    Admit {
        prompt: u32,
        len: usize,
        salt: Option<i128>,
        hashed: bool,
    },
    /// Admits with digests that repeat after so many blocks.
    Repeated {
        prompt: u32,
        len: usize,
        period: usize,
    },
    Extend {
        which: usize,
        n: usize,
    },
    Commit {
        which: usize,
        part: usize,
    },
    Step,
    Complete {
        which: usize,
        rank: u32,
        failed: u64,
    },
    Stale,
    End {
        which: usize,
        kind: u8,
    },
    Reset,
    /// A whole request: admit, load, compute, step (its stores may stay in flight), release.
    Full {
        prompt: u32,
        len: usize,
        store: bool,
    },
    /// A stored prefix comes back by loads, some of which fail; the request stays live.
    Return {
        prompt: u32,
        len: usize,
        failed: u64,
    },
    /// Pushes every idle block out of the Gpu tier.
    Wipe,
}
