// SPDX-License-Identifier: MIT OR Apache-2.0
//! A transport of one's own: four processes, without MPI, over Unix sockets (`sockets.rs`).
//!
//! `cargo run --release --example own_transport` starts itself once for each rank. The ranks check their links and
//! compute one attention; each compares its rows with those of one rank. `cargo test --example own_transport` tests the
//! contract.
#![allow(missing_docs, reason = "a program has no users of its items")]

#[cfg(unix)]
mod sockets;
#[cfg(all(unix, test))]
mod tests;

#[cfg(unix)]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    processes::main()
}

#[cfg(not(unix))]
fn main() {
    println!("this example needs Unix sockets");
}

#[cfg(unix)]
mod processes {
    use super::sockets::Sockets;
    use cpattn::{
        Batch, Dtype, Forward, Layout, Mesh, Plan, Problem, Rank, Side, View, ViewMut,
        transport::{local, ring_check::Link},
    };
    use std::{env, fs, path::Path, process::Command, time::Duration};

    const WORLD: usize = 4;
    const HEADS: usize = 4;
    const KV_HEADS: usize = 2;
    const DIM: usize = 64;
    const DEADLINE: Duration = Duration::from_secs(20);

    /// Without arguments the program that starts the ranks; with a folder and a number one of the ranks.
    pub fn main() -> Result<(), Box<dyn std::error::Error>> {
        if let [_, folder, rank] = env::args().collect::<Vec<_>>().as_slice() {
            return one_rank(Path::new(folder), rank.parse()?);
        }
        let folder = env::temp_dir().join(format!("own_transport_{}", std::process::id()));
        fs::create_dir(&folder)?;
        let start = |rank: usize| Command::new(env::current_exe()?).arg(&folder).arg(rank.to_string()).spawn();
        let ranks: Vec<_> = (0..WORLD).map(start).collect::<Result<_, _>>()?;
        let mut failed = 0;
        for mut rank in ranks {
            failed += usize::from(!rank.wait()?.success());
        }
        fs::remove_dir_all(&folder)?;
        if failed > 0 { Err(format!("{failed} of {WORLD} ranks failed").into()) } else { Ok(()) }
    }

    fn one_rank(folder: &Path, rank: usize) -> Result<(), Box<dyn std::error::Error>> {
        let transport = Sockets::connect(folder, rank, WORLD, DEADLINE)?;
        for link in Link::check_all(&transport, 1 << 20)?.iter().filter(|_| rank == 0) {
            let Link { from, to, latency, bytes_per_second, .. } = link;
            println!("link {from} → {to}: {latency:?}, {:.1} GB/s", bytes_per_second / 1e9);
        }
        let batch = Batch::from_lengths(&[300, 17, 195])?;
        let tokens = batch.tokens(Side::Q);
        let wave = |heads: usize, step: f32| (0..tokens * heads * DIM).map(|i| (i as f32 * step).sin()).collect();
        let inputs: [Vec<f32>; 3] = [wave(HEADS, 0.37), wave(KV_HEADS, 0.71), wave(KV_HEADS, 0.13)];
        let problem = Problem::new(batch, HEADS, KV_HEADS, DIM, Dtype::F32);

        let plan = Plan::new(&problem, Mesh { replicas: 1, ring: 2, ulysses: 2 }.in_world(WORLD)?, Layout::Zigzag)?;
        let mine = attention(&mut Rank::new(transport), &plan, &inputs)?;
        let single = Plan::new(&problem, Mesh::single(), Layout::Contiguous)?;
        let whole = local::run(1, DEADLINE, |end| attention(&mut Rank::new(end), &single, &inputs))?;
        let expected = plan.local_tokens(Side::Q, rank).shard(&whole[0], HEADS * DIM)?;
        let apart = mine.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        println!("rank {rank}, {} tokens: largest difference from one rank {apart:e}", expected.len() / (HEADS * DIM));
        if apart < 1e-5 { Ok(()) } else { Err("a wrong row, or one that nothing wrote".into()) }
    }

    /// o of the rank's own tokens.
    fn attention(rank: &mut Rank, plan: &Plan, [q, k, v]: &[Vec<f32>; 3]) -> cpattn::Result<Vec<f32>> {
        let (r, n) = (rank.rank(), plan.local_tokens(Side::Q, rank.rank()).len());
        let q = plan.local_tokens(Side::Q, r).shard(q, HEADS * DIM)?;
        let [k, v] = [
            plan.local_tokens(Side::K, r).shard(k, KV_HEADS * DIM)?,
            plan.local_tokens(Side::K, r).shard(v, KV_HEADS * DIM)?,
        ];
        let (mut o, mut lse) = (vec![f32::NAN; n * HEADS * DIM], vec![f32::NAN; n * HEADS]);
        let tensors = Forward::new(
            View::new(&q, n, HEADS, DIM)?,
            View::new(&k, n, KV_HEADS, DIM)?,
            View::new(&v, n, KV_HEADS, DIM)?,
            ViewMut::new(&mut o, n, HEADS, DIM)?,
            ViewMut::head_major(&mut lse, n, HEADS)?,
        );
        rank.forward(plan, tensors)?;
        Ok(o)
    }
}
