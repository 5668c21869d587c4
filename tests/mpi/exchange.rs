// SPDX-License-Identifier: MIT OR Apache-2.0
//! What must work: exchanges of any shape, agreements, whole plans.

use std::time::Duration;

use cpattn::{
    Backward, Batch, Dtype, Error, Forward, Layout, Mesh, Plan, Problem, Rank, Result, Side, View, ViewMut,
    transport::{Label, Message, Transport, mpi::Mpi},
};
use mpi::{
    environment::Universe,
    topology::{Color, SimpleCommunicator},
    traits::*,
};

use crate::launch::FINE;

pub const LONG: Duration = Duration::from_secs(60);

pub fn init() -> (Universe, SimpleCommunicator) {
    let (universe, _) = mpi::initialize_with_threading(mpi::Threading::Multiple).expect("the first initialisation");
    let world = universe.world();
    (universe, world)
}

pub fn label(operation: &'static str, step: u32) -> Label {
    Label::new(operation, step)
}

/// Exchanges lists of (peer, bytes) and (peer, buffer).
pub fn exchange(
    rank: &impl Transport,
    label: Label,
    sends: &[(usize, &[u8])],
    recvs: &mut [(usize, &mut [u8])],
) -> Result<()> {
    let message = |peer, ptr, bytes| Message { peer, ptr, bytes };
    let sends: Vec<_> = sends.iter().map(|(peer, b)| message(*peer, b.as_ptr().cast_mut(), b.len())).collect();
    let recvs: Vec<_> = recvs.iter_mut().map(|(peer, b)| message(*peer, b.as_mut_ptr(), b.len())).collect();
    // SAFETY: the ranges are borrowed, the receives mutably, until the call returns.
    unsafe { rank.exchange(label, &sends, &recvs) }
}

/// Numbers that every process draws alike.
struct Draw(fastrand::Rng);

impl Draw {
    fn size(&mut self) -> usize {
        // Below, at and beyond the pieces that the test sets.
        match self.0.u32(..8) {
            0 => 1,
            1 => 1000,
            2 => self.0.usize(999..=1001),
            3 => self.0.usize(1..300_000),
            4 => 3000,
            _ => self.0.usize(1..2500),
        }
    }
}

/// Byte `at` of message `number` from one rank to another.
fn byte(from: usize, to: usize, number: usize, at: usize) -> u8 {
    (from * 31 + to * 17 + number * 7 + at * 13 + at / 251) as u8
}

pub fn random() {
    let (_universe, comm) = init();
    for piece in [1000, 256 << 10] {
        let rank = Mpi::new(&comm, LONG).unwrap();
        rank.set_piece(piece);
        let (me, world) = (rank.rank(), rank.world());
        let mut draw = Draw(fastrand::Rng::with_seed(7));
        for round in 0..20 {
            // By sender and receiver: the sizes of up to four messages.
            let all: Vec<Vec<Vec<usize>>> = (0..world)
                .map(|_| (0..world).map(|_| (0..draw.0.usize(..5)).map(|_| draw.size()).collect()).collect())
                .collect();
            let full = |from: usize, to: usize, number: usize, n| (0..n).map(|i| byte(from, to, number, i)).collect();
            let mut sends: Vec<(usize, Vec<u8>)> = Vec::new();
            let mut recvs: Vec<(usize, Vec<u8>)> = Vec::new();
            for peer in (0..world).filter(|&p| p != me) {
                sends.extend(all[me][peer].iter().enumerate().map(|(i, &n)| (peer, full(me, peer, i, n))));
                // Guarded on both sides by bytes that must stay.
                recvs.extend(all[peer][me].iter().map(|&n| (peer, vec![0xa5; n + 2])));
            }
            let out: Vec<_> = sends.iter().map(|(p, b)| (*p, b.as_slice())).collect();
            let mut into: Vec<_> = recvs.iter_mut().map(|(p, b)| (*p, b.split_last_mut().unwrap().1)).collect();
            let mut into: Vec<_> = into.iter_mut().map(|(p, b)| (*p, b.split_first_mut().unwrap().1)).collect();
            exchange(&rank, label("random", round), &out, &mut into).unwrap();
            let mut numbers = vec![0; world];
            for (peer, got) in &recvs {
                let number = numbers[*peer];
                numbers[*peer] += 1;
                let (inner, n) = (&got[1..got.len() - 1], got.len());
                assert_eq!(inner, full(*peer, me, number, n - 2) as Vec<u8>, "round {round}, from {peer}");
                assert_eq!((got[0], got[n - 1]), (0xa5, 0xa5), "round {round}: a neighbour was written");
            }
        }
        rank.poll().unwrap();
    }
    println!("{FINE}");
}

/// Longer than the counts of MPI can say: one rank sends, the other looks at every byte.
pub fn huge() {
    let (_universe, comm) = init();
    let rank = Mpi::new(&comm, 10 * LONG).unwrap();
    let n = (1_usize << 31) + 12_345;
    // As long as no piece is a multiple of it: pieces that change places show.
    let pattern: Vec<u8> = (0..65_521_usize).map(|i| (i ^ i >> 8) as u8).collect();
    let mut all = vec![0_u8; n];
    if rank.rank() == 0 {
        all.chunks_mut(pattern.len()).for_each(|c| c.copy_from_slice(&pattern[..c.len()]));
    }
    rank.agree(0..2, 1).unwrap();
    let began = std::time::Instant::now();
    if rank.rank() == 0 {
        exchange(&rank, label("huge", 0), &[(1, &all)], &mut []).unwrap();
    } else {
        exchange(&rank, label("huge", 0), &[], &mut [(0, &mut all)]).unwrap();
        let took = began.elapsed();
        assert!(all.chunks(pattern.len()).all(|c| c == &pattern[..c.len()]), "a byte is wrong");
        println!("{n} bytes in {took:.1?}");
    }
    println!("{FINE}");
}

pub fn uneven() {
    let (_universe, comm) = init();
    let rank = Mpi::new(&comm, LONG).unwrap();
    rank.set_piece(16);
    if rank.rank() == 0 {
        exchange(&rank, label("both", 0), &[(1, &[1; 40]), (1, &[2; 5])], &mut []).unwrap();
    } else {
        let (mut a, mut b) = ([0; 40], [0; 5]);
        exchange(&rank, label("one", 0), &[], &mut [(0, &mut a)]).unwrap();
        exchange(&rank, label("other", 1), &[], &mut [(0, &mut b)]).unwrap();
        assert_eq!((a, b), ([1; 40], [2; 5]));
    }
    println!("{FINE}");
}

pub fn agreements() {
    let (_universe, comm) = init();
    let rank = Mpi::new(&comm, LONG).unwrap();
    let me = rank.rank();
    for round in 0..50 {
        rank.agree(0..4, round).unwrap();
        // Groups of two at their own pace.
        rank.agree(me / 2 * 2..me / 2 * 2 + 2, round + me as u64 / 2).unwrap();
    }
    let number = if me == 2 { 9 } else { 5 };
    let error = rank.agree(0..4, number).unwrap_err();
    let (peer, theirs) = if me == 2 { (0, 5) } else { (2, 9) };
    assert_eq!(error, Error::disagreement(me, peer, number, theirs));
    // It ends nothing.
    rank.agree(0..4, 1).unwrap();
    let error = rank.agree(0..5, 1).unwrap_err().to_string();
    assert!(error.contains("group is 0..5"), "{error}");
    println!("{FINE}");
}

/// One rank still agrees while others exchange already.
pub fn overlap() {
    let (_universe, comm) = init();
    let rank = Mpi::new(&comm, LONG).unwrap();
    let me = rank.rank();
    for round in 0..200_u32 {
        let mut got = [0; 4];
        // Ranks 0 and 1 agree and go on to exchange with rank 2 and each other, in all orders.
        match me {
            0 => {
                rank.agree(0..2, 3).unwrap();
                exchange(&rank, label("a", round), &[(1, &[1; 4]), (2, &[2; 4])], &mut [(2, &mut got)]).unwrap();
            }
            1 => {
                rank.agree(0..2, 3).unwrap();
                exchange(&rank, label("b", round), &[], &mut [(0, &mut got)]).unwrap();
            }
            _ => exchange(&rank, label("c", round), &[(0, &[3; 4])], &mut [(0, &mut got)]).unwrap(),
        }
        assert_eq!(got, [[3; 4], [1; 4], [2; 4]][me]);
    }
    println!("{FINE}");
}

fn problem() -> Problem {
    let batch = Batch::from_lengths(&[90, 0, 41, 129]).unwrap();
    Problem::new(batch, 6, 3, 16, Dtype::F32)
}

fn view(x: &[f32], n: usize, heads: usize, dim: usize) -> View<'_, f32> {
    View::new(x, n, heads, dim).unwrap()
}

fn write(x: &mut [f32], n: usize, heads: usize, dim: usize) -> ViewMut<'_, f32> {
    ViewMut::new(x, n, heads, dim).unwrap()
}

/// o, lse, dq, dk and dv of this rank, as bits.
fn run(rank: &mut Rank, plan: &Plan) -> Vec<Vec<u32>> {
    let (r, p) = (rank.rank(), plan.problem());
    let mut random = fastrand::Rng::with_seed(3);
    let mut tensor = |side: Side, heads: usize| -> Vec<f32> {
        let all: Vec<f32> = (0..p.batch().tokens(side) * heads * 16).map(|_| random.f32() - 0.5).collect();
        plan.local_tokens(side, r).shard(&all, heads * 16).unwrap()
    };
    let (q, k, v, d_o) = (tensor(Side::Q, 6), tensor(Side::K, 3), tensor(Side::K, 3), tensor(Side::Q, 6));
    let (nq, nk) = (plan.local_tokens(Side::Q, r).len(), plan.local_tokens(Side::K, r).len());
    let (mut o, mut lse) = (vec![f32::NAN; nq * 96], vec![f32::NAN; nq * 6]);
    let (mut dq, mut dk, mut dv) = (vec![f32::NAN; nq * 96], vec![f32::NAN; nk * 48], vec![f32::NAN; nk * 48]);
    let (q, k, v, d_o) = (view(&q, nq, 6, 16), view(&k, nk, 3, 16), view(&v, nk, 3, 16), view(&d_o, nq, 6, 16));
    let forward = Forward::new(q, k, v, write(&mut o, nq, 6, 16), write(&mut lse, nq, 6, 1));
    rank.forward(plan, forward).unwrap();
    let backward = Backward::new(
        q,
        k,
        v,
        view(&o, nq, 6, 16),
        view(&lse, nq, 6, 1),
        d_o,
        [write(&mut dq, nq, 6, 16), write(&mut dk, nk, 3, 16), write(&mut dv, nk, 3, 16)],
    );
    rank.backward(plan, backward).unwrap();
    [o, lse, dq, dk, dv].into_iter().map(|x| x.into_iter().map(f32::to_bits).collect()).collect()
}

/// The same bits as ranks that are threads.
pub fn plans() {
    let (_universe, comm) = init();
    let mut rank = Rank::new(Mpi::new(&comm, LONG).unwrap());
    let world = rank.world();
    for (ulysses, ring, layout) in [(4, 1, Layout::Contiguous), (1, 4, Layout::Zigzag), (2, 2, Layout::ZigzagPack)] {
        let plan = Plan::new(&problem(), Mesh { replicas: 1, ring, ulysses }.in_world(world).unwrap(), layout).unwrap();
        let ours = run(&mut rank, &plan);
        let threads: Vec<_> = cpattn::transport::local::group(world, LONG)
            .unwrap()
            .into_iter()
            .map(|end| {
                let plan = plan.clone();
                std::thread::spawn(move || run(&mut Rank::new(end), &plan))
            })
            .collect();
        let theirs: Vec<_> = threads.into_iter().map(|t| t.join().unwrap()).collect();
        assert!(ours == theirs[rank.rank()], "{ulysses} × {ring} {layout:?}: the bits differ");
    }
    println!("{FINE}");
}

/// All processes of a test share a node; a communicator of any of them too.
pub fn nodes() {
    let (_universe, comm) = init();
    assert_eq!(Mpi::ranks_per_node(&comm).unwrap(), 4);
    let pair = comm.split_by_color(Color::with_value(comm.rank() % 2)).unwrap();
    assert_eq!(Mpi::ranks_per_node(&pair).unwrap(), 2);
    println!("{FINE}");
}

/// Ranks are those of the communicator, not of the job; two groups at a time do not meet.
pub fn part_of_the_job() {
    let (_universe, comm) = init();
    let me = comm.rank();
    // Odd and even processes, each group in reverse.
    let half = comm.split_by_color_with_key(Color::with_value(me % 2), -me).unwrap();
    let (part, whole) = (Mpi::new(&half, LONG).unwrap(), Mpi::new(&comm, LONG).unwrap());
    assert_eq!((part.world(), part.rank()), (2, usize::from(me < 2)));
    for round in 0..20 {
        let (mut a, mut b) = ([0; 2], [0; 1]);
        exchange(&part, label("part", round), &[(1 - part.rank(), &[me as u8; 2])], &mut [(1 - part.rank(), &mut a)])
            .unwrap();
        assert_eq!(a, [(me as u8 + 2) % 4; 2]);
        let (next, last) = ((me as usize + 1) % 4, (me as usize + 3) % 4);
        exchange(&whole, label("whole", round), &[(next, &[me as u8])], &mut [(last, &mut b)]).unwrap();
        assert_eq!(b, [last as u8]);
    }
    println!("{FINE}");
}
