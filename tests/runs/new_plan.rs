// SPDX-License-Identifier: MIT OR Apache-2.0
//! One rank runs what is new to it, and agrees on it first, where the others run what all agreed on before. Neither can
//! go on. Every rank finds it at once, says what it runs itself, and names a rank that runs something else.

use crate::agreement::{FAR, Job, on_ranks};
use cpattn::{
    Batch, Dtype, Error, Forward, Layout, Mesh, Options, Plan, Problem, Rank, Result, Side, View, ViewMut,
    plan::Circulate,
    runtime::{CombineTensors, KeyIndices, Keys},
    schedule::CombineTo,
};

/// `old` has run on all ranks; then `odd` runs `new`, and the others `old` again.
fn differ(
    world: usize,
    words: &str,
    old: &(dyn Fn(&mut Rank) -> Result<()> + Sync),
    new: &(dyn Fn(&mut Rank) -> Result<()> + Sync),
) {
    for odd in 0..world {
        let errors = on_ranks(world, FAR, |mut rank| {
            old(&mut rank).unwrap();
            let is_odd = rank.rank() == odd;
            // A rank that is still in the run that all make gets the error there, if the others go on without it.
            let first = old(&mut rank).and_then(|()| if is_odd { new(&mut rank) } else { old(&mut rank) });
            let first = first.unwrap_err();
            // The group has failed, on every rank alike.
            for again in [old(&mut rank), new(&mut rank), rank.poll(), rank.handle().poll()] {
                assert_eq!(again, Err(first.clone()), "{words}, rank {odd} is odd");
            }
            first
        });
        let numbers: Vec<_> = errors
            .iter()
            .enumerate()
            .map(|(r, error)| match error {
                Error::Disagreement { rank, peer, ours, theirs, what, runs: None } => {
                    assert!(*rank == r && ours != theirs, "{words}, rank {odd} is odd: {error}");
                    assert!((*peer == odd) != (r == odd), "{words}, rank {odd} is odd: rank {r} names {peer}");
                    assert!(what.contains(words), "{what}");
                    [*ours, *theirs]
                }
                other => panic!("{words}, rank {odd} is odd: rank {r} returned {other:?}"),
            })
            .collect();
        let [new, old] = numbers[odd];
        for (r, &numbers) in numbers.iter().enumerate() {
            assert!(r == odd || numbers == [old, new], "{words}, rank {odd} is odd: {errors:?}");
        }
    }
}

#[test]
fn another_plan() {
    for world in [2, 3, 4] {
        let old = Job::ring(&[30, 6], world);
        // Documents, sizes, and a mesh: whichever messages the others wait for.
        let mesh = Mesh::ulysses(world).unwrap();
        for new in [
            Job::ring(&[31, 6], world),
            Job::ring(&[3, 300], world),
            Job::new(&[30, 6], [4, 2], mesh, Layout::Contiguous, Options::new()),
        ] {
            differ(world, "the forward of", &|rank| old.forward(rank), &|rank| new.forward(rank));
        }
    }
}

/// The direction alone is new.
#[test]
fn another_direction() {
    for world in [2, 3] {
        let job = Job::ring(&[30, 6], world);
        differ(world, "ward of 36 tokens", &|rank| job.forward(rank), &|rank| job.backward(rank));
    }
}

/// The plan is the same, and the name of the run too: what is new is its target.
#[test]
fn a_combine_to_another_target() {
    for world in [2, 3] {
        let problem = Problem::new(Batch::from_lengths(&[9]).unwrap(), 4, 2, 8, Dtype::F32);
        let plan = Plan::new(&problem, Mesh::ring(world).unwrap(), Layout::Contiguous).unwrap();
        let combine = |to: CombineTo| {
            let plan = &plan;
            move |rank: &mut Rank| {
                let share = plan.combined_share(rank.rank(), to);
                let (n, h) = (share.tokens.len(), share.heads.len());
                let (part, part_lse) = ([1.0f32; 9 * 4 * 8], [0.0f32; 9 * 4]);
                let (mut o, mut lse) = (vec![0.0f32; n * h * 8], vec![0.0f32; n * h]);
                let tensors = CombineTensors::new(
                    View::new(&part, 9, 4, 8).unwrap(),
                    View::head_major(&part_lse, 9, 4).unwrap(),
                    ViewMut::new(&mut o, n, h, 8).unwrap(),
                    ViewMut::new(&mut lse, n, h, 1).unwrap(),
                );
                rank.combine(plan, to, tensors)
            }
        };
        differ(world, "combine", &combine(CombineTo::All), &combine(CombineTo::Tokens));
    }
}

/// The plan and the direction are the same: what is new is the number of entries.
#[test]
fn lists_of_another_size() {
    for world in [2, 3] {
        let problem = Problem::new(Batch::from_lengths(&[36]).unwrap(), 2, 1, 4, Dtype::F32);
        let options = Options::new().circulate(Circulate::Keys);
        let plan = Plan::builder(&problem).mesh(Mesh::ring(world).unwrap()).layout(Layout::Zigzag).options(options);
        let plan = plan.build().unwrap();
        let listed = |entries: usize| {
            let plan = &plan;
            move |rank: &mut Rank| {
                let n = plan.local_tokens(Side::Q, rank.rank()).len();
                let (q, k, indices) = (vec![0.5f32; n * 2 * 4], vec![0.5f32; n * 4], vec![-1; n * entries]);
                let (mut o, mut lse) = (vec![0.0f32; n * 2 * 4], vec![0.0f32; n * 2]);
                let tensors = Forward::new(
                    View::new(&q, n, 2, 4).unwrap(),
                    View::new(&k, n, 1, 4).unwrap(),
                    View::new(&k, n, 1, 4).unwrap(),
                    ViewMut::new(&mut o, n, 2, 4).unwrap(),
                    ViewMut::head_major(&mut lse, n, 2).unwrap(),
                );
                let lists = KeyIndices { indices: &indices, heads: 1, entries };
                rank.forward(plan, tensors.keys(Keys::Listed(lists)))
            }
        };
        differ(world, "key_indices of 1 heads", &listed(3), &listed(5));
    }
}
