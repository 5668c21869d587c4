// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ways to run a small problem, each with its good run: what every rank returns, and which calls of its transport it
//! makes, with which peers. The calls are where faults go, and they tell who needs a culprit.

use crate::act::{Act, FAR};
use crate::common::{
    Data,
    through::{Hook, Through},
};
use crate::rank::{Parts, backward, forward};
use cpattn::{
    Batch, Dtype, Layout, Mask, Mesh, Options, Plan, Problem, Rank, Result,
    plan::{Circulate, Gather},
    transport::{
        Label, Message, Transport,
        local::{self, Local},
    },
};
use std::{
    collections::BTreeSet,
    ops::Range,
    sync::{Arc, Mutex},
    thread,
};

/// One call of a transport.
#[derive(Clone, Debug)]
pub struct Call {
    pub label: Label,
    pub peers: BTreeSet<usize>,
}

/// Writes down the calls of a transport.
#[derive(Default)]
struct Tap(Arc<Mutex<Vec<Call>>>);

impl Hook<Local> for Tap {
    fn agree(&self, end: &Local, group: Range<usize>, number: u64) -> Result<()> {
        let label = Label::new("agree", 0);
        self.0.lock().unwrap().push(Call { label, peers: group.clone().collect() });
        end.agree(group, number)
    }
    unsafe fn exchange(&self, end: &Local, label: Label, sends: &[Message], recvs: &[Message]) -> Result<()> {
        let peers = sends.iter().chain(recvs).map(|m| m.peer).collect();
        self.0.lock().unwrap().push(Call { label, peers });
        // SAFETY: the caller's promise is handed on.
        unsafe { end.exchange(label, sends, recvs) }
    }
}

/// A way to run a small problem.
pub struct Mode {
    pub name: &'static str,
    pub plan: Plan,
    pub data: Data<f32>,
    /// By rank: what a good run returns.
    pub good: Vec<(Parts, Parts)>,
    /// By rank: the calls of a good run.
    pub calls: Vec<Vec<Call>>,
}

impl Mode {
    pub fn new(name: &'static str, problem: Problem, mesh: Mesh, options: Options) -> Self {
        let plan = Plan::builder(&problem).mesh(mesh).layout(Layout::Zigzag).options(options).build().unwrap();
        let data = Data::<f32>::random(&problem, 3);
        let mut mode = Self { name, plan, data, good: Vec::new(), calls: Vec::new() };
        let taps: Vec<_> = local::group(mode.plan.mesh().world(), FAR)
            .unwrap()
            .into_iter()
            .map(|end| Through::new(end, Tap::default()))
            .collect();
        let lists: Vec<_> = taps.iter().map(|t| Arc::clone(&t.hook.0)).collect();
        mode.good = thread::scope(|scope| {
            let run = |tap: Through<Local, Tap>| {
                let mut rank = Rank::new(tap);
                let made = forward(&mut rank, &mode.plan, &mode.data).unwrap();
                let gradients = backward(&mut rank, &mode.plan, &mode.data, &made).unwrap();
                (made, gradients)
            };
            let threads: Vec<_> = taps.into_iter().map(|tap| scope.spawn(move || run(tap))).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        mode.calls = lists.iter().map(|l| l.lock().unwrap().clone()).collect();
        mode
    }

    pub fn world(&self) -> usize {
        self.calls.len()
    }

    /// How many calls the forward of a rank makes.
    pub fn forward_calls(&self, rank: usize) -> usize {
        self.calls[rank].iter().skip(1).position(|c| c.label.operation == "agree").unwrap() + 1
    }

    /// Whether `rank` meets `culprit` in a call of the culprit's that does not take place.
    pub fn needs(&self, rank: usize, culprit: usize, act: Act) -> bool {
        let from = match act {
            Act::At(at, _) => at as usize,
            Act::DropBetween | Act::PanicBetween => self.forward_calls(culprit),
            _ => 0,
        };
        self.calls[culprit][from..].iter().any(|c| c.peers.contains(&rank))
    }
}

pub fn modes() -> Vec<Mode> {
    let batch = Batch::from_lengths(&[13, 0, 6, 9]).unwrap();
    let p = || Problem::new(batch.clone(), 4, 2, 8, Dtype::F32);
    let mesh = |u, r| Mesh { replicas: 1, ring: r, ulysses: u };
    let o = Options::new;
    vec![
        Mode::new("Ulysses", p(), mesh(3, 1), o()),
        Mode::new("ring", p(), mesh(1, 4), o().circulate(Circulate::Keys)),
        Mode::new("hybrid", p().with_mask(Mask::full()), mesh(2, 2), o()),
        Mode::new("gather", p(), mesh(1, 3), o().gather(true)),
        Mode::new("together", p(), mesh(1, 3), o().gather(Gather::Together)),
        Mode::new("queries", p(), mesh(1, 3), o().circulate(Circulate::Queries)),
        Mode::new("queries forward", p(), mesh(1, 3), o().circulate_forward(Circulate::Queries)),
        Mode::new("reproducible", p(), mesh(2, 2), o().reproducible(true)),
        Mode::new("passes", p(), mesh(1, 3), o().passes(2)),
        Mode::new("sinks", p().with_sinks(true).with_softcap(2.0), mesh(2, 2), o()),
        Mode::new("replicas", p(), Mesh { replicas: 2, ring: 2, ulysses: 1 }, o()),
    ]
}
