// SPDX-License-Identifier: MIT OR Apache-2.0
//! The cost of an exchange of transport `local`: synchronisation (small messages) and copying (large messages).
//!
//! Times are per exchange, seen from rank 0, with one thread per rank; throughput counts the bytes that one rank
//! receives. A machine with fewer cores than ranks measures its scheduler too.
//!
//! `cargo bench --bench exchange`

use cpattn::transport::{Label, Message, Transport, local, local::Local};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;
use std::thread;
use std::time::{Duration, Instant};

/// Runs `count` times the exchange that `peers` describes (to whom a rank sends, and from whom it receives) on a
/// thread per rank; rank 0's time.
fn time(world: usize, bytes: usize, count: u64, peers: fn(&Local) -> (Vec<usize>, Vec<usize>)) -> Duration {
    let ranks = local::group(world, Duration::from_secs(60)).unwrap();
    let work = |rank: Local| {
        let (to, from) = peers(&rank);
        let mut out = vec![vec![1_u8; bytes]; to.len()];
        let mut into = vec![vec![0_u8; bytes]; from.len()];
        let message = |(&peer, memory): (&usize, &mut Vec<u8>)| Message { peer, ptr: memory.as_mut_ptr(), bytes };
        let sends: Vec<_> = to.iter().zip(&mut out).map(message).collect();
        let recvs: Vec<_> = from.iter().zip(&mut into).map(message).collect();
        rank.agree(0..world, 0).unwrap();
        let start = Instant::now();
        for _ in 0..count {
            // SAFETY: the memory outlives the loop, and nothing touches it there.
            unsafe { rank.exchange(Label::new("bench", 0), &sends, &recvs) }.unwrap();
        }
        let took = start.elapsed();
        black_box(&into);
        took
    };
    thread::scope(|scope| {
        let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(|| work(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()[0]
    })
}

fn ring(rank: &Local) -> (Vec<usize>, Vec<usize>) {
    let (me, world) = (rank.rank(), rank.world());
    (vec![(me + 1) % world], vec![(me + world - 1) % world])
}

fn all_to_all(rank: &Local) -> (Vec<usize>, Vec<usize>) {
    let (me, world) = (rank.rank(), rank.world());
    ((1..world).map(|hop| (me + hop) % world).collect(), (1..world).map(|hop| (me + world - hop) % world).collect())
}

fn exchange(criterion: &mut Criterion) {
    for (name, peers) in [("ring", ring as fn(&Local) -> _), ("all_to_all", all_to_all)] {
        let mut group = criterion.benchmark_group(name);
        group.sample_size(10).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_secs(1));
        for world in [2, 8] {
            for bytes in [64, 64 << 10, 4 << 20] {
                let received = bytes * if name == "ring" { 1 } else { world - 1 };
                group.throughput(Throughput::Bytes(received as u64));
                group.bench_function(BenchmarkId::new(format!("{world} ranks"), bytes), |bencher| {
                    bencher.iter_custom(|count| time(world, bytes, count, peers));
                });
            }
        }
    }
}

criterion_group!(benches, exchange);
criterion_main!(benches);
