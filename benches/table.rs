//! Criterion benches of the table: cost per call from 1 k to 1 M blocks, alone in one thread, and of the mutex variant.

#![allow(clippy::expect_used, clippy::cast_sign_loss)] // a bench that fails must stop; times are positive

mod mutex_table;
mod workload;

use std::time::{Duration, Instant};

use criterion::{criterion_group, criterion_main, BenchmarkGroup, Criterion, Throughput};
use kvtier::hash::Identity;
use mutex_table::MutexTable;
use workload::{document, hit, miss, session, Full, Scheduler, Spill, BLOCK_SIZE};

type Group<'a> = BenchmarkGroup<'a, criterion::measurement::WallTime>;

fn hits_and_lookups<T: Scheduler>(group: &mut Group<'_>, name: &str, make: impl Fn(usize) -> T) {
    for (blocks, size) in [(1_000, "1k"), (20_000, "20k"), (100_000, "100k"), (1_000_000, "1M")] {
        for (hold, suffix) in [(false, ""), (true, "_all_but_one_held")] {
            let mut table = make(blocks);
            let mut full = Full::fill(&mut table, blocks, 256, hold);
            group.bench_function(format!("{name}/hit_256/{size}{suffix}"), |bench| {
                bench.iter(|| {
                    let (id, hashes) = full.next();
                    hit(&mut table, id, hashes);
                });
            });
            group.bench_function(format!("{name}/lookup_256/{size}{suffix}"), |bench| {
                bench.iter(|| table.lookup(full.next().1));
            });
        }
    }
}

fn misses<T: Scheduler>(group: &mut Group<'_>, name: &str, make: impl Fn(usize) -> T) {
    for (blocks, size) in [(1_000, "1k"), (20_000, "20k"), (100_000, "100k")] {
        let mut table = make(blocks);
        let mut number = 0;
        let mut one = || {
            number += 1;
            let hashes = document(number, 256);
            let start = Instant::now();
            miss(&mut table, number as i64, &hashes);
            start.elapsed()
        };
        (0..3 * blocks / 256).for_each(|_| {
            one();
        });
        group.bench_function(format!("{name}/miss_256/{size}"), |bench| {
            bench.iter_custom(|n| (0..n).map(|_| one()).sum::<Duration>());
        });
    }
}

fn through_the_cpu_tier<T: Scheduler>(group: &mut Group<'_>, name: &str, mut table: T) {
    let mut spill = Spill::new(1280);
    for _ in 0..Spill::DOCUMENTS {
        spill.store(&mut table);
    }
    // Goes on from one call of the closure to the next: the Gpu tier has the document of the last turn.
    let mut turn = 0;
    group.bench_function(format!("{name}/hit_side_1280"), |bench| {
        bench.iter_custom(|n| {
            let time = (0..n).map(|at| spill.hit(&mut table, turn + at)).sum();
            turn += n;
            time
        });
    });
    group.bench_function(format!("{name}/store_side_1280"), |bench| {
        bench.iter_custom(|n| (0..n).map(|_| spill.store(&mut table)).sum::<Duration>());
    });
}

fn benches(criterion: &mut Criterion) {
    let mutex = |gpu, cpu| &*Box::leak(Box::new(MutexTable::new(gpu, cpu, BLOCK_SIZE)));
    let mut group = criterion.benchmark_group("table");
    group.throughput(Throughput::Elements(256));
    hits_and_lookups(&mut group, "kvtier", |blocks| session(blocks, 0));
    hits_and_lookups(&mut group, "mutex", |blocks| mutex(blocks, 0));
    misses(&mut group, "kvtier", |blocks| session(blocks, 2 * blocks));
    misses(&mut group, "mutex", |blocks| mutex(blocks, 2 * blocks));
    let table = session(1, 0).table().clone();
    let tokens: Vec<u32> = (0..256 * BLOCK_SIZE as u32).collect();
    group.bench_function("kvtier/hash_256", |bench| bench.iter(|| table.block_hashes(&tokens, &Identity::default())));
    group.throughput(Throughput::Elements(1280));
    let (gpu, cpu) = (Spill::gpu_blocks(1280), Spill::cpu_blocks(1280));
    through_the_cpu_tier(&mut group, "kvtier", session(gpu, cpu));
    through_the_cpu_tier(&mut group, "mutex", mutex(gpu, cpu));
    group.finish();
}

criterion_group! {
    name = table;
    config = Criterion::default().warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    targets = benches
}
criterion_main!(table);
