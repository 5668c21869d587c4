// SPDX-License-Identifier: MIT OR Apache-2.0
//! Every combination of options on small random problems.
//!
//! Meshes × layouts × masks × score options × element types × forms. Each combination is either refused by the plan,
//! with a reason, or runs forward and backward and is checked against the bounds of [`super::check`]. All reproducible
//! runs of one problem must have the same bits, whatever the mesh and the layout.
//!
//! Ranks are kept while plans change, as in a training run: one team for each world size.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

use cpattn::{
    Batch, Dtype, Element, Layout, Mask, Mesh, Options, Plan, Problem,
    plan::{Circulate, Gather, Wire},
};
use half::{bf16, f16};

use crate::{
    json::{Json, JsonOption},
    options::alibi_slopes,
    progress::Progress,
};

use super::{
    check::{Checked, Expected, check},
    input::{Batched, Random},
    reference::reference,
    team::{How, Results, Team},
};

const HEADS: usize = 6;
const KV_HEADS: usize = 3;
const HEAD_DIM: usize = 16;
const VALUE_DIM: usize = 8;
/// An empty document, one token, and one far longer than the rest.
const LENGTHS: [usize; 5] = [11, 0, 1, 33, 6];
/// Of the combinations, `--quick` takes every so many; a prime that divides no dimension, so that all values occur.
const SAMPLE: usize = 11;
const TENSORS: [&str; 6] = ["o", "lse", "dq", "dk", "dv", "dsinks"];

const LAYOUTS: [Layout; 6] = [
    Layout::Contiguous,
    Layout::Zigzag,
    Layout::ZigzagPack,
    Layout::Striped { stripe: 1 },
    Layout::Striped { stripe: 5 },
    Layout::Balanced { chunks: 3 },
];

const DTYPES: [Dtype; 4] = [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::F64];

fn meshes() -> Vec<Mesh> {
    let mesh = |replicas, ulysses, ring| Mesh { replicas, ring, ulysses };
    vec![
        mesh(1, 1, 1),
        mesh(1, 2, 1),
        mesh(1, 4, 1),
        mesh(1, 6, 1),
        mesh(1, 1, 2),
        mesh(1, 1, 3),
        mesh(1, 1, 8),
        mesh(1, 2, 2),
        mesh(1, 3, 2),
        mesh(1, 2, 3),
        mesh(1, 4, 2),
        mesh(2, 2, 2),
    ]
}

fn masks() -> [(&'static str, Mask); 4] {
    [
        ("causal", Mask::causal()),
        ("full", Mask::full()),
        ("window 7,0", Mask::window(7, 0)),
        ("window 5,3", Mask::window(5, 3)),
    ]
}

type Setter = fn(Problem) -> Problem;

fn scores() -> [(&'static str, Setter); 5] {
    fn softcap(p: Problem) -> Problem {
        p.with_softcap(2.0)
    }
    fn alibi(p: Problem) -> Problem {
        p.with_alibi_slopes(&alibi_slopes(HEADS))
    }
    fn sinks(p: Problem) -> Problem {
        p.with_sinks(true)
    }
    [
        ("plain", |p| p),
        ("softcap", softcap),
        ("alibi", alibi),
        ("sinks", sinks),
        ("all three", |p| sinks(alibi(softcap(p)))),
    ]
}

fn forms() -> Vec<(&'static str, Options)> {
    let o = Options::new;
    vec![
        ("ring", o()),
        ("gather", o().gather(true)),
        ("together", o().gather(Gather::Together)),
        ("together, bf16", o().gather(Gather::Together).wire(Wire::Bf16)),
        ("passes 2", o().passes(2)),
        ("gather, passes 3", o().gather(true).passes(3)),
        ("circulate keys", o().circulate(Circulate::Keys)),
        ("circulate queries", o().circulate(Circulate::Queries)),
        ("forward queries", o().circulate_forward(Circulate::Queries)),
        ("packed inputs", o().pack_inputs(true)),
        ("wire bf16", o().wire(Wire::Bf16)),
        ("wire bf16, queries", o().wire(Wire::Bf16).circulate(Circulate::Queries)),
        ("reproducible", o().reproducible(true)),
        ("passes 2, queries", o().passes(2).circulate(Circulate::Queries)),
        ("gather, queries", o().gather(true).circulate(Circulate::Queries)),
        ("reproducible, bf16", o().reproducible(true).wire(Wire::Bf16)),
        ("reproducible, passes 2", o().reproducible(true).passes(2)),
        ("reproducible, queries", o().reproducible(true).circulate(Circulate::Queries)),
    ]
}

/// One row of the table.
#[derive(Default)]
struct Row {
    runs: usize,
    refused: usize,
    failed: usize,
    worst: [f64; TENSORS.len()],
}

struct Suite {
    quick: bool,
    seed: u64,
    /// Position in the enumeration of all combinations.
    at: usize,
    teams: HashMap<usize, Team>,
    rows: Vec<(&'static str, Vec<(String, Row)>)>,
    refusals: BTreeMap<String, usize>,
    /// By reason: how often, and where first.
    failures: BTreeMap<String, (usize, String)>,
    same_bits: usize,
    progress: Progress,
}

/// Runs the suite; whether nothing failed.
pub fn run(quick: bool, seed: u64, json: &JsonOption) -> Result<bool, String> {
    let names = |names: Vec<String>| names.into_iter().map(|n| (n, Row::default())).collect();
    let rows: Vec<(&'static str, Vec<(String, Row)>)> = vec![
        ("mesh", names(meshes().iter().map(Mesh::to_string).collect())),
        ("layout", names(LAYOUTS.iter().map(Layout::to_string).collect())),
        ("mask", names(masks().iter().map(|m| m.0.to_owned()).collect())),
        ("score", names(scores().iter().map(|s| s.0.to_owned()).collect())),
        ("dtype", names(DTYPES.iter().map(Dtype::to_string).collect())),
        ("form", names(forms().iter().map(|f| f.0.to_owned()).collect())),
    ];
    let all: usize = rows.iter().map(|r| r.1.len()).product();
    let mut suite = Suite {
        quick,
        seed,
        at: 0,
        teams: HashMap::new(),
        rows,
        refusals: BTreeMap::new(),
        failures: BTreeMap::new(),
        same_bits: 0,
        progress: Progress::new(all, "combinations"),
    };
    suite.all_of::<f32>(0)?;
    suite.all_of::<f16>(1)?;
    suite.all_of::<bf16>(2)?;
    suite.all_of::<f64>(3)?;
    suite.progress.clear();
    suite.print(json)?;
    Ok(suite.failures.is_empty())
}

impl Suite {
    /// All combinations of one element type.
    fn all_of<T: Element>(&mut self, dtype: usize) -> Result<(), String> {
        let batch = Batch::from_lengths(&LENGTHS).map_err(|e| e.to_string())?;
        let batched = Batched::random(batch.clone(), [HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM], self.seed)?;
        for (i_score, (_, score)) in scores().into_iter().enumerate() {
            for (i_mask, (_, mask)) in masks().into_iter().enumerate() {
                let problem =
                    Problem::new(batch.clone(), HEADS, KV_HEADS, HEAD_DIM, T::DTYPE).with_value_dim(VALUE_DIM);
                let problem = score(problem.with_mask(mask));
                let sinks = problem.sinks().then(|| Random::new(!self.seed).sinks(HEADS));
                let inputs = Arc::new(batched.convert::<T>(sinks).0);
                let want = reference(&problem, &inputs, || ());
                let want = Expected::new(&problem, &inputs, &want)?;
                let mut bits: Option<Results<T>> = None;
                for (i_mesh, mesh) in meshes().into_iter().enumerate() {
                    for (i_layout, layout) in LAYOUTS.into_iter().enumerate() {
                        for (i_form, (_, options)) in forms().into_iter().enumerate() {
                            let picked = !self.quick || self.at.is_multiple_of(SAMPLE);
                            self.at += 1;
                            self.progress.step();
                            if !picked {
                                continue;
                            }
                            let indices = [i_mesh, i_layout, i_mask, i_score, dtype, i_form];
                            let plan = match Plan::builder(&problem).mesh(mesh).layout(layout).options(options).build()
                            {
                                Ok(plan) => plan,
                                Err(e) => {
                                    *self.refusals.entry(e.to_string()).or_default() += 1;
                                    self.each_row(indices, |row| row.refused += 1);
                                    continue;
                                }
                            };
                            match self.one(&plan, &inputs, &want, &mut bits) {
                                Ok(checked) => self.note(indices, &checked),
                                Err(reason) => self.fail(indices, reason, ""),
                            }
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// One combination: errors of the replica that did worst.
    fn one<T: Element>(
        &mut self,
        plan: &Plan,
        inputs: &Arc<super::team::Inputs<T>>,
        want: &Expected,
        bits: &mut Option<Results<T>>,
    ) -> Result<Vec<Checked>, String> {
        let world = plan.mesh().world();
        let team = match self.teams.remove(&world) {
            Some(team) => team,
            None => Team::new(world, Duration::from_secs(600))?,
        };
        let how = How { repeat: 1, record: false, tick: Arc::new(|| ()) };
        // A group that failed stays failed: its team is not kept.
        let outcome = team.run(plan, inputs, &how)?;
        self.teams.insert(world, team);
        let mut worst: Vec<Checked> = Vec::new();
        for results in outcome.results {
            let checked = check(plan, inputs, &results, want);
            if plan.options().reproducible {
                let first = bits.get_or_insert_with(|| results.clone());
                if let Some(tensor) = first.differs(&results) {
                    return Err(format!("{tensor} has other bits than the first reproducible run of this problem"));
                }
                self.same_bits += 1;
            }
            worst = worse(worst, checked);
        }
        Ok(worst)
    }

    fn each_row(&mut self, indices: [usize; 6], mut f: impl FnMut(&mut Row)) {
        for ((_, rows), i) in self.rows.iter_mut().zip(indices) {
            f(&mut rows[i].1);
        }
    }

    fn note(&mut self, indices: [usize; 6], checked: &[Checked]) {
        self.each_row(indices, |row| {
            row.runs += 1;
            for (worst, c) in row.worst.iter_mut().zip(checked) {
                *worst = worst.max(c.ratio());
            }
        });
        for c in checked.iter().filter(|c| !c.passes()) {
            let detail = format!(" ({:.2e}, bound {:.2e})", c.error, c.bound);
            self.fail(indices, format!("the error of {} is over its bound", c.name), &detail);
        }
    }

    fn fail(&mut self, indices: [usize; 6], reason: String, detail: &str) {
        let what: Vec<&str> = self.rows.iter().zip(indices).map(|((_, rows), i)| rows[i].0.as_str()).collect();
        let first = format!("{}{detail}", what.join("; "));
        self.failures.entry(reason).or_insert((0, first)).0 += 1;
        self.each_row(indices, |row| row.failed += 1);
    }

    fn print(&self, json: &JsonOption) -> Result<(), String> {
        let text = json.text();
        let print = |name: &str, cells: [String; 9]| {
            text.line(format_args!("{name:36}{}", cells.map(|c| format!("{c:>9}")).concat()))
        };
        text.line("worst error relative to its bound, over all combinations in which the option takes part\n")?;
        let mut head = vec!["runs", "refused", "failed"];
        head.extend(TENSORS);
        let mut total = (0, 0);
        for (dimension, rows) in &self.rows {
            print(dimension, std::array::from_fn(|i| head[i].to_owned()))?;
            for (name, row) in rows {
                let count = [row.runs, row.refused, row.failed];
                print(
                    &format!("  {name}"),
                    std::array::from_fn(|i| match i {
                        0..3 => count[i].to_string(),
                        _ if row.runs == 0 || row.worst[i - 3] == 0.0 => "-".to_owned(),
                        _ => format!("{:.3}", row.worst[i - 3]),
                    }),
                )?;
            }
            total = rows.iter().fold((0, 0), |t, (_, row)| (t.0 + row.runs, t.1 + row.refused));
            text.line("")?;
        }
        if !self.refusals.is_empty() {
            let lines = self.refusals.iter().map(|(reason, n)| format!("{n:>7} × {reason}\n"));
            text.line(format_args!("refused:\n{}", lines.collect::<String>()))?;
        }
        if !self.failures.is_empty() {
            let lines = self.failures.iter().map(|(reason, (n, first))| format!("{n:>7} × {reason}; first: {first}\n"));
            text.line(format_args!("failed:\n{}", lines.collect::<String>()))?;
        }
        let failures = self.failures.values().map(|f| f.0).sum::<usize>();
        text.line(format_args!("{} results of reproducible runs compared bit by bit", self.same_bits))?;
        text.line(format_args!("{} combinations ran, {} were refused, {failures} failures", total.0, total.1))?;
        json.write(|| {
            let reason = |(reason, (n, first)): (&String, &(usize, String))| {
                Json::Object(vec![
                    ("reason", Json::text(reason)),
                    ("count", Json::count(*n)),
                    ("first", Json::text(first)),
                ])
            };
            Json::Object(vec![
                ("ran", Json::count(total.0)),
                ("refused", Json::count(total.1)),
                ("failures", Json::count(failures)),
                ("failed", Json::list(self.failures.iter().map(reason))),
                ("same_bits", Json::count(self.same_bits)),
                (
                    "worst",
                    Json::list(
                        self.rows
                            .iter()
                            .flat_map(|(dimension, rows)| rows.iter().map(|row| row_as_json(dimension, row))),
                    ),
                ),
            ])
        })
    }
}

/// A row, with the errors relative to their bounds.
fn row_as_json(dimension: &str, (name, row): &(String, Row)) -> Json {
    let errors =
        Json::Object(TENSORS.iter().zip(row.worst).map(|(&tensor, worst)| (tensor, Json::Number(worst))).collect());
    Json::Object(vec![
        ("option", Json::text(dimension)),
        ("value", Json::text(name)),
        ("ran", Json::count(row.runs)),
        ("refused", Json::count(row.refused)),
        ("failed", Json::count(row.failed)),
        ("errors", errors),
    ])
}

/// Tensor by tensor the one that is worse by its bound.
pub fn worse(a: Vec<Checked>, b: Vec<Checked>) -> Vec<Checked> {
    if a.is_empty() {
        return b;
    }
    a.into_iter().zip(b).map(|(a, b)| if a.ratio() >= b.ratio() { a } else { b }).collect()
}

impl<T: Element> Results<T> {
    /// The first tensor with other bits.
    fn differs(&self, other: &Self) -> Option<&'static str> {
        fn same<U: Element>(a: &[U], b: &[U]) -> bool {
            bytemuck::cast_slice::<U, u8>(a) == bytemuck::cast_slice::<U, u8>(b)
        }
        let same = [
            same(&self.o, &other.o),
            same(&self.lse, &other.lse),
            same(&self.dq, &other.dq),
            same(&self.dk, &other.dk),
            same(&self.dv, &other.dv),
            same(&self.dsinks, &other.dsinks),
        ];
        same.iter().position(|same| !same).map(|i| TENSORS[i])
    }
}
