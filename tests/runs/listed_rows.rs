// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs over listed keys that move only the listed rows: drawn problems against f64, with NaN in every row that is in
//! no list; the bytes that move; what is kept from run to run.

use crate::common::{Data, Lists, Random, check_within, gather, run};
use crate::context_parallel::mesh;
use crate::listed::dense;
use crate::refused::refused;
use cpattn::{
    Backward, Batch, Dtype, Forward, Layout, Mask, Mesh, Options, Plan, Problem, Rank, Result, Side, View, ViewMut,
    plan::{Circulate, Gather, KeyRows},
    runtime::{KeyIndices, KeyRowBytes, Keys},
    schedule::Direction,
    transport::local,
};
use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

/// Lists of keys that the mask allows, of a drawn number of entries: many share some keys, some name none, and some
/// ranks' tokens name none.
fn drawn_lists(p: &Problem, r: &mut Random) -> Lists {
    let (heads, entries) = ([1, p.kv_heads()][r.below(2)], 1 + r.below(9));
    let (near, silent) = (r.below(3), r.below(4) == 0);
    let mut all = Vec::new();
    let (plan, score, tokens) =
        (Plan::new(p, Mesh::single(), Layout::Contiguous).unwrap(), p.score(), p.batch().tokens(Side::Q));
    plan.local_tokens(Side::Q, 0).for_each(|token, position, doc| {
        let keys = p.batch().document(Side::K, doc).len() as i64;
        for _ in 0..heads {
            let mut allowed: Vec<i32> = (0..keys).filter(|&k| score.allows(position, k)).map(|k| k as i32).collect();
            (1..allowed.len()).for_each(|i| allowed.swap(i, r.below(i + 1)));
            // The first keys of a document, its last ones, or any.
            match near {
                0 => allowed.sort_unstable(),
                1 => allowed.sort_unstable_by_key(|&k| -k),
                _ => {}
            }
            allowed.truncate(if silent && token < tokens / 2 { 0 } else { r.below(entries + 1) });
            allowed.resize(entries, -1);
            (1..entries).for_each(|i| allowed.swap(i, r.below(i + 1)));
            all.extend(allowed);
        }
    });
    Lists { all, heads, entries }
}

fn drawn_batch(r: &mut Random) -> Batch {
    let q: Vec<usize> = (0..1 + r.below(4)).map(|_| [0, 1, r.below(9), 1 + r.below(40)][r.below(4)]).collect();
    if r.below(3) > 0 {
        return Batch::from_lengths(&q).unwrap();
    }
    let ends = |list: &[usize]| {
        let mut cu = vec![0];
        list.iter().for_each(|&n| cu.push(cu[cu.len() - 1] + n as i32));
        cu
    };
    let k: Vec<usize> = q.iter().map(|_| 1 + r.below(40)).collect();
    Batch::cross(&ends(&q), &ends(&k), None).unwrap()
}

/// The k tokens of the batch that some list names.
fn named(p: &Problem, lists: &Lists, tokens: &[usize], heads: std::ops::Range<usize>) -> BTreeSet<usize> {
    let (mut docs, batch) = (Vec::new(), p.batch());
    (0..batch.documents()).for_each(|d| docs.extend(batch.document(Side::Q, d).map(|_| d)));
    let mut found = BTreeSet::new();
    for &t in tokens {
        for head in if lists.heads == 1 { 0..1 } else { heads.clone() } {
            let list = &lists.all[(t * lists.heads + head) * lists.entries..][..lists.entries];
            let first = batch.document(Side::K, docs[t]).start;
            found.extend(list.iter().filter(|&&k| k >= 0).map(|&k| first + k as usize));
        }
    }
    found
}

/// Drawn problems, meshes, layouts, options and lists. Rows of k and v that no list names are NaN, and each rank
/// receives the rows that its own lists name alone, so a row too few is a wrong result, and one too many may be a NaN.
#[test]
fn drawn_problems() {
    let count = if std::env::var_os("CPATTN_LONG").is_some() { 3_000 } else { 300 };
    let mut r = Random::new(48);
    let (mut compared, mut listed_moved) = (0, 0);
    for round in 0..count {
        let (kv_heads, group) = (1 + r.below(3), 1 + r.below(2));
        let mask =
            [Mask::full(), Mask::causal(), Mask::sliding(1 + r.below(12) as u32), Mask::window(3, 5)][r.below(4)];
        let p = Problem::new(drawn_batch(&mut r), kv_heads * group, kv_heads, 8, Dtype::F32)
            .with_value_dim(4)
            .with_mask(mask)
            .with_sinks(r.below(3) == 0);
        let mut data = Data::<f32>::random(&p, round);
        let lists = drawn_lists(&p, &mut r);
        let tokens: Vec<usize> = (0..p.batch().tokens(Side::Q)).collect();
        let some = named(&p, &lists, &tokens, 0..kv_heads);
        for t in (0..p.batch().tokens(Side::K)).filter(|t| !some.contains(t)) {
            data.k[t * kv_heads * 8..][..kv_heads * 8].fill(f32::NAN);
            data.v[t * kv_heads * 4..][..kv_heads * 4].fill(f32::NAN);
        }
        data.key_indices = Some(lists);
        let want = dense(&p, &data);
        let one = run(&Plan::new(&p, Mesh::single(), Layout::Contiguous).unwrap(), &data).unwrap();
        let ulysses = 1 + r.below(2.min(kv_heads * group));
        let mesh = mesh(ulysses, 2 + r.below(3));
        let layout = [
            Layout::Contiguous,
            Layout::Zigzag,
            Layout::ZigzagPack,
            Layout::Striped { stripe: 1 + r.below(3) as u32 },
            Layout::Balanced { chunks: 2 },
        ][r.below(5)];
        let options = Options::new()
            .circulate(Circulate::Keys)
            .circulate_forward(Circulate::Keys)
            .gather([Gather::Steps, Gather::Others, Gather::Together][r.below(3)])
            .passes(1 + r.below(kv_heads))
            .pack_inputs(r.below(2) == 0)
            .ranks_per_node(r.below(3))
            .key_rows([KeyRows::Listed, KeyRows::Auto][r.below(2)]);
        // Passes do not go together with every gather.
        let Ok(plan) = Plan::builder(&p).mesh(mesh).layout(layout).options(options).build() else { continue };
        let what = format!("{round}: {mesh}, {layout}, {options:?}");
        match run(&plan, &data) {
            Ok(got) => {
                check_within(16.0, &what, &got, &one, &want);
                compared += 1;
                listed_moved += u64::from(options.key_rows == KeyRows::Listed);
            }
            // Passes whose calls have some of a rank's q heads are refused over lists, moved either way.
            Err(e) => assert!(e.to_string().contains("plan with another gather, or without passes"), "{what}: {e}"),
        }
    }
    // Few plans are refused, and half of the others force listed rows.
    let text = format!("{compared} of {count} compared, {listed_moved} of them with listed rows");
    assert!(compared * 10 > count * 9 && listed_moved * 5 > count * 2, "{text}");
}

/// Room for the results of a rank.
struct Own {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    lists: Vec<i32>,
    tokens: [usize; 2],
}

impl Own {
    fn of(plan: &Plan, rank: usize, data: &Data<f32>, lists: &Lists) -> Self {
        let p = plan.problem();
        let [tq, tk] = [Side::Q, Side::K].map(|side| plan.local_tokens(side, rank).indices());
        Self {
            q: gather(&data.q, &tq, p.heads() * p.head_dim()),
            k: gather(&data.k, &tk, p.kv_heads() * p.head_dim()),
            v: gather(&data.v, &tk, p.kv_heads() * p.value_dim()),
            lists: gather(&lists.all, &tq, lists.heads * lists.entries),
            tokens: [tq.len(), tk.len()],
        }
    }

    /// Forward and backward, and what each moved.
    fn both(&self, plan: &Plan, rank: &mut Rank, lists: &Lists) -> Result<[Moved; 2]> {
        let p = plan.problem();
        let ([n, m], h, hk, d, dv) = (self.tokens, p.heads(), p.kv_heads(), p.head_dim(), p.value_dim());
        let keys = Keys::Listed(KeyIndices { indices: &self.lists, heads: lists.heads, entries: lists.entries });
        let (mut o, mut lse) = (vec![0.0; n * h * dv], vec![0.0; n * h]);
        let (q, k, v) = (View::new(&self.q, n, h, d)?, View::new(&self.k, m, hk, d)?, View::new(&self.v, m, hk, dv)?);
        let out = (ViewMut::new(&mut o, n, h, dv)?, ViewMut::head_major(&mut lse, n, h)?);
        rank.forward(plan, Forward::new(q, k, v, out.0, out.1).keys(keys))?;
        let forward = Moved::of(rank);
        let (mut dq, mut dk, mut d_v) = (vec![0.0; n * h * d], vec![0.0; m * hk * d], vec![0.0; m * hk * dv]);
        let gradients =
            [ViewMut::new(&mut dq, n, h, d)?, ViewMut::new(&mut dk, m, hk, d)?, ViewMut::new(&mut d_v, m, hk, dv)?];
        let d_o = vec![0.5; n * h * dv];
        let (o, lse) = (View::new(&o, n, h, dv)?, View::head_major(&lse, n, h)?);
        rank.backward(plan, Backward::new(q, k, v, o, lse, View::new(&d_o, n, h, dv)?, gradients).keys(keys))?;
        Ok([forward, Moved::of(rank)])
    }
}

/// What a run counted, and the bytes of its exchanges on the ring, sent and received, where the rank records.
#[derive(Clone, Copy, Debug)]
struct Moved {
    counts: Option<KeyRowBytes>,
    fetched: u64,
    returned: u64,
}

impl Moved {
    fn of(rank: &mut Rank) -> Self {
        let events = rank.trace().events();
        let of = |name| events.iter().filter(|e| e.name == name && e.phase == "ring").map(|e| e.bytes).sum();
        Self { counts: rank.workspace().key_row_bytes(), fetched: of("fetch"), returned: of("return") }
    }

    fn counts(&self) -> Option<(u64, u64, KeyRows)> {
        self.counts.map(|b| (b.listed, b.allowed, b.moved))
    }
}

/// One document of 96 tokens on 3 ranks; each token lists itself and 3 of the first 8 keys.
fn few() -> (Problem, Lists) {
    let p = Problem::new(Batch::from_lengths(&[96]).unwrap(), 4, 2, 8, Dtype::F32);
    let all = (0..96).flat_map(|t: i32| {
        [t, t % 8 - 8, (t + 1) % 8 - 8, (t + 3) % 8 - 8].map(|k| if k < 0 && t > 8 { k + 8 } else { k.max(-1) })
    });
    (p, Lists { all: all.collect(), heads: 1, entries: 4 })
}

fn plan_of(p: &Problem, rows: KeyRows) -> Plan {
    let options =
        Options::new().circulate(Circulate::Keys).circulate_forward(Circulate::Keys).gather(false).key_rows(rows);
    Plan::builder(p).mesh(mesh(1, 3)).layout(Layout::Contiguous).options(options).build().unwrap()
}

/// Exchanges of k and v receive as many bytes as the union of the lists has, and gradients come back for as many rows;
/// the automatic choice takes them, and counts them.
#[test]
fn bytes_are_those_of_the_union() {
    let (p, lists) = few();
    let data = Data::<f32>::random(&p, 4);
    for rows in [KeyRows::Auto, KeyRows::Listed, KeyRows::Allowed] {
        let moved = moved_by(&plan_of(&p, rows), &data, &lists);
        // Ranks 1 and 2 need eight rows of rank 0; by the mask 32 of each rank before. Forward and backward fetch.
        let listed = rows != KeyRows::Allowed;
        let received = if listed { 8 + 8 } else { 32 + 64 };
        let row = (8 + 8) * 2 * 4;
        assert_eq!(sums(&moved), [[2 * received * row, 0], [2 * received * row; 2]], "{rows:?}");
        for [forward, backward] in moved {
            // A run of eight rows is one pair of numbers.
            let counts = |row| listed.then_some((16 * row + 2 * 8, 96 * row, KeyRows::Listed));
            assert_eq!([forward.counts(), backward.counts()], [counts(row), counts(2 * row)], "{rows:?}");
        }
    }
}

/// Lists that name nearly all rows, each in a run of its own, are more bytes than the mask's rows: those move. In the
/// backward rows are twice the bytes, so that the listed ones are fewer.
#[test]
fn the_fewer_bytes_are_chosen() {
    let p = Problem::new(Batch::from_lengths(&[99]).unwrap(), 1, 1, 1, Dtype::F32);
    // Every second row of each share, 17 of 33. Each is 8 bytes and its numbers 8; a row of the mask is 8.
    let keys: Vec<i32> = (0..99).filter(|k| k % 33 % 2 == 0).collect();
    let all = (0..99).flat_map(|t: i32| keys.iter().map(move |&k| if k <= t { k } else { -1 }));
    let lists = Lists { all: all.collect(), heads: 1, entries: keys.len() };
    let data = Data::<f32>::random(&p, 4);
    let moved = moved_by(&plan_of(&p, KeyRows::Auto), &data, &lists);
    // Three shares travel: one to rank 1 and two to rank 2.
    let (listed, allowed, row) = (3 * 17, 3 * 33, 8);
    for [forward, backward] in &moved {
        assert_eq!(forward.counts(), Some((listed * (row + 8), allowed * row, KeyRows::Allowed)));
        assert_eq!(backward.counts(), Some((listed * (2 * row + 8), allowed * 2 * row, KeyRows::Listed)));
    }
    assert_eq!(sums(&moved), [[2 * allowed * row, 0], [2 * listed * row; 2]]);
}

/// What a forward and a backward move on each rank of three.
fn moved_by(plan: &Plan, data: &Data<f32>, lists: &Lists) -> Vec<[Moved; 2]> {
    let each = local::run(3, Duration::from_secs(60), |end| {
        let mut rank = Rank::new(end);
        rank.trace().record(Instant::now(), 1 << 12)?;
        Own::of(plan, rank.rank(), data, lists).both(plan, &mut rank, lists)
    });
    each.unwrap()
}

/// The bytes that all ranks fetch and return in the forward and in the backward; each is sent and received.
fn sums(moved: &[[Moved; 2]]) -> [[u64; 2]; 2] {
    [0, 1].map(|of_direction| {
        let sum = |of: fn(&Moved) -> u64| moved.iter().map(|both| of(&both[of_direction])).sum();
        [sum(|m| m.fetched), sum(|m| m.returned)]
    })
}

/// Steps are kept for the same rows, and for no other: lists that change on one rank alone, forth and back, move the
/// rows that fresh ranks would move.
#[test]
fn steps_are_kept_for_the_same_rows_alone() {
    let (p, first) = few();
    let mut second = first.clone();
    // Tokens of rank 2 list other rows.
    second.all[64 * 4..].chunks_mut(4).for_each(|list| list[1] = 40);
    let mut third = second.clone();
    third.all[32 * 4..64 * 4].chunks_mut(4).for_each(|list| list[2] = 20);
    let data = Data::<f32>::random(&p, 4);
    let plan = plan_of(&p, KeyRows::Listed);
    let all = [&first, &second, &third, &first, &third, &second, &first];
    let fetched = local::run(3, Duration::from_secs(60), |end| {
        let mut rank = Rank::new(end);
        rank.trace().record(Instant::now(), 1 << 12)?;
        let each = all.iter().map(|lists| {
            let own = Own::of(&plan, rank.rank(), &data, lists);
            let both = own.both(&plan, &mut rank, lists)?;
            Ok(both.iter().map(|moved| moved.fetched).sum::<u64>())
        });
        each.collect::<Result<Vec<_>>>()
    })
    .unwrap();
    let sums: Vec<u64> = (0..all.len()).map(|i| fetched.iter().map(|of_rank| of_rank[i]).sum()).collect();
    let row = 2 * 2 * 2 * (8 + 8) * 4;
    assert_eq!(sums, [16, 16 + 1, 16 + 2, 16, 16 + 2, 16 + 1, 16].map(|rows| rows * row));
}

/// A workspace that the caller lends is for the plan as it is, so the mask's rows move, or the listed ones if they fit.
#[test]
fn lent_workspaces() {
    let (p, lists) = few();
    let data = Data::<f32>::random(&p, 4);
    for (rows, lists, extra) in
        [(KeyRows::Auto, &lists, 0), (KeyRows::Listed, &lists, 1 << 20), (KeyRows::Listed, &many(), 1 << 20)]
    {
        let plan = plan_of(&p, rows);
        let moved = local::run(3, Duration::from_secs(60), |end| {
            let mut rank = Rank::new(end);
            let bytes = rank.workspace().bytes(&plan, Direction::Backward)? as usize + extra;
            let _memory = lend(&mut rank, bytes)?;
            let both = Own::of(&plan, rank.rank(), &data, lists).both(&plan, &mut rank, lists)?;
            Ok(both.map(|moved| moved.counts.map(|b| b.moved)))
        });
        let want = if rows == KeyRows::Auto { KeyRows::Allowed } else { KeyRows::Listed };
        assert_eq!(moved.unwrap(), [[Some(want); 2]; 3]);
    }
}

/// Three of four keys: packed, they need more memory than what is sent in place.
fn many() -> Lists {
    let all = (0..96).flat_map(|t: i32| (0..96).map(move |k| if k <= t && k % 4 != 1 { k } else { -1 }));
    Lists { all: all.collect(), heads: 1, entries: 96 }
}

fn lend(rank: &mut Rank, bytes: usize) -> Result<Vec<[u8; 4096]>> {
    let mut memory = vec![[0u8; 4096]; bytes / 4096 + 2];
    let start = memory.as_mut_ptr().cast::<u8>();
    // SAFETY: callers keep the memory for as long as the rank has it, and nothing else uses it.
    unsafe { rank.workspace().lend(start.add(start.align_offset(256)), bytes) }?;
    Ok(memory)
}

/// Listed rows that do not fit a lent workspace of one rank are refused by all ranks in the same words, and the group
/// goes on: with as many bytes as the refusal names, with a workspace of the rank's own, or with the rows of the mask.
#[test]
fn a_small_workspace_is_refused_by_all() {
    let (p, few) = few();
    let (data, lists) = (Data::<f32>::random(&p, 4), many());
    let [plan, allowed] = [KeyRows::Listed, KeyRows::Allowed].map(|rows| plan_of(&p, rows));
    // The ranks that lend: all, or one alone.
    for lenders in [0..3, 0..1, 1..2, 2..3] {
        let texts = local::run(3, Duration::from_secs(60), |end| {
            let mut rank = Rank::new(end);
            let (me, mut texts, mut memory) = (rank.rank(), Vec::new(), Vec::new());
            let own = Own::of(&plan, me, &data, &lists);
            let mut bytes = rank.workspace().bytes(&plan, Direction::Backward)? as usize;
            loop {
                if lenders.contains(&me) {
                    memory.push(lend(&mut rank, bytes)?);
                }
                let Err(error) = own.both(&plan, &mut rank, &lists) else { break };
                let text = error.to_string();
                refused(Err::<(), _>(error), &["workspace is", "bytes on rank", "key_rows allowed"]);
                let named = text.split("at least ").nth(1).and_then(|rest| rest.split(' ').next());
                bytes = bytes.max(named.unwrap().parse().unwrap());
                texts.push(text);
                assert!(texts.len() < 3, "{texts:?}");
                // Between refusals the group runs what fits.
                own.both(&allowed, &mut rank, &lists)?;
            }
            rank.workspace().take_back()?;
            own.both(&plan, &mut rank, &lists)?;
            Own::of(&plan, me, &data, &few).both(&plan, &mut rank, &few)?;
            Ok(texts)
        })
        .unwrap();
        assert!(texts.iter().all(|of_rank| *of_rank == texts[0]), "{lenders:?}: {texts:?}");
        // Rank 0 alone packs more than its plan has room for.
        assert_eq!(texts[0].is_empty(), lenders.start > 0, "{lenders:?}: {texts:?}");
    }
}

/// A tensor of one rank that lies where listed rows would be, in the part of the workspace that the plan leaves, is
/// refused by all ranks, and the group goes on.
#[test]
fn a_tensor_in_the_workspace_of_one_rank() {
    let (p, _) = few();
    let (data, lists) = (Data::<f32>::random(&p, 4), many());
    let [listed, allowed] = [KeyRows::Listed, KeyRows::Allowed].map(|rows| plan_of(&p, rows));
    let texts = local::run(3, Duration::from_secs(60), |end| {
        let mut rank = Rank::new(end);
        let me = rank.rank();
        let own = Own::of(&listed, me, &data, &lists);
        let ([n, m], bytes) = (own.tokens, rank.workspace().bytes(&listed, Direction::Forward)? as usize);
        let mut memory = vec![[0u8; 4096]; (bytes + (1 << 20)) / 4096 + 2];
        let start = memory.as_mut_ptr().cast::<u8>();
        let start = start.wrapping_add(start.align_offset(256));
        let place = start.wrapping_add(bytes.next_multiple_of(256)).cast::<f32>();
        // SAFETY: the memory outlives the rank's runs, and q is behind what runs over it write.
        let inside = unsafe {
            rank.workspace().lend(start, bytes + (1 << 20))?;
            place.copy_from_nonoverlapping(own.q.as_ptr(), own.q.len());
            std::slice::from_raw_parts(place, own.q.len())
        };
        let (mut o, mut lse) = (vec![0.0; n * 4 * 8], vec![0.0; n * 4]);
        let mut forward = |plan: &Plan, q: &[f32]| {
            let keys = Keys::Listed(KeyIndices { indices: &own.lists, heads: 1, entries: lists.entries });
            let q = View::new(q, n, 4, 8)?;
            let (k, v) = (View::new(&own.k, m, 2, 8)?, View::new(&own.v, m, 2, 8)?);
            let out = (ViewMut::new(&mut o, n, 4, 8)?, ViewMut::head_major(&mut lse, n, 4)?);
            rank.forward(plan, Forward::new(q, k, v, out.0, out.1).keys(keys))
        };
        let q = if me == 0 { inside } else { &own.q[..] };
        forward(&allowed, q)?;
        let refusal = forward(&listed, q).map_err(|error| error.to_string());
        forward(&allowed, q)?;
        forward(&listed, &own.q)?;
        Ok(refusal.unwrap_err())
    })
    .unwrap();
    assert!(texts[0].contains("q") && texts[0].contains("workspace"), "{texts:?}");
    assert!(texts[1..].iter().all(|text| text.contains("tensors of rank 0") && text.contains("key_rows")), "{texts:?}");
}
