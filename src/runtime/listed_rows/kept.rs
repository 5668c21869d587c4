// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ring steps over listed rows that a rank keeps from run to run, and the prepared schedules of the last few.
//!
//! Whoever lacks the steps of a run exchanges rows, so all ranks of a group must have the same entries: what is
//! forgotten follows from the group's runs and from numbers that all its ranks have. A schedule is made from steps by
//! the rank alone. It takes a hundred times their memory, so it is kept for the last entries only: a layer over the
//! rows of the layer before it, a backward after its forward. A run over older rows prepares its schedule again.

use std::{ops::Range, sync::Arc, vec::Vec};

use crate::{
    error::Result,
    plan::Plan,
    runtime::prepared::Prepared,
    schedule::{Direction, ListedRows, Purpose, RingSteps, Schedule},
};

/// Entries that are kept for each group of ranks: layers of a model, between their forward and their backward.
const REMEMBERED: usize = 64;
/// Rows that the busiest rank lists, in all entries of a group. A run of them takes 8 bytes there and 8 at its owner.
/// So rows that are all apart take 64 MiB on a rank that lists them, and as much again for those that others list of
/// it; an owner whose rows all ranks list has `ring − 1` times as many.
const REMEMBERED_ROWS: u64 = 1 << 23;
/// Entries whose schedules are kept, over all groups.
const PREPARED: usize = 4;
/// Runs of rows, in and out, of all entries whose schedules are kept. Each takes up to 0.9 kB, forward and
/// backward together. The entry of the last run has its schedules whatever its rows.
const PREPARED_RUNS: usize = 1 << 16;

/// Steps and schedules for the same rows.
struct KeptEntry {
    key: u64,
    used: u64,
    /// Rows that the busiest rank needs.
    rows: u64,
    /// Runs of rows that this rank receives and sends.
    runs: usize,
    steps: Arc<RingSteps>,
    prepared: [Option<Prepared>; 2],
}

/// What a rank keeps of its runs over listed rows, by group.
#[derive(Default)]
pub(super) struct KeptSteps {
    groups: Vec<(Range<usize>, Vec<KeptEntry>)>,
    uses: u64,
}

/// Steps that are kept.
pub(super) struct KeptPlace {
    group: usize,
    at: usize,
}

impl KeptSteps {
    /// Finds the steps of a key, or keeps those of `rows`: this rank's listed rows, and how many the busiest rank has.
    ///
    /// # Errors
    /// Those of `rows`.
    pub(super) fn find_or_make(
        &mut self,
        (group, key): (&Range<usize>, u64),
        (plan, rank): (&Plan, usize),
        rows: impl FnOnce() -> Result<(ListedRows, u64)>,
    ) -> Result<KeptPlace> {
        let place = self.groups.iter().position(|(ranks, _)| ranks == group).unwrap_or(self.groups.len());
        if place == self.groups.len() {
            self.groups.push((group.clone(), Vec::new()));
        }
        let kept = &mut self.groups[place].1;
        self.uses += 1;
        let at = match kept.iter().position(|entry| entry.key == key) {
            Some(at) => at,
            None => {
                let (mut listed, rows) = rows()?;
                listed.incoming.iter_mut().chain(&mut listed.outgoing).for_each(Vec::shrink_to_fit);
                let runs = listed.incoming.iter().chain(&listed.outgoing).map(Vec::len).sum();
                let ring = plan.mesh().coordinates(rank).ring;
                let steps = RingSteps::listed(plan.shares(), plan.problem().allowed(), plan.form(), ring, listed);
                make_room(kept, rows);
                kept.push(KeptEntry { key, used: 0, rows, runs, steps: Arc::new(steps), prepared: [None, None] });
                kept.len() - 1
            }
        };
        kept[at].used = self.uses;
        Ok(KeptPlace { group: place, at })
    }

    /// The schedule over kept steps, which is prepared first if it is not kept too.
    ///
    /// # Errors
    /// Those of planning.
    pub(super) fn prepared(
        &mut self,
        KeptPlace { group, at }: KeptPlace,
        (plan, rank): (&Plan, usize),
        direction: Direction,
    ) -> Result<&mut Prepared> {
        self.drop_old_schedules();
        let entry = &mut self.groups[group].1[at];
        let kept = &mut entry.prepared[direction as usize];
        let purpose = Purpose::Attention(direction);
        if kept.as_ref().is_some_and(|prepared| !prepared.is(plan, purpose, false)) {
            *kept = None;
        }
        if kept.is_none() {
            let schedule = Schedule::over_listed_steps(plan, rank, direction, Arc::clone(&entry.steps))?;
            *kept = Some(Prepared::of_schedule(plan, purpose, schedule)?.tagged());
        }
        Ok(kept.as_mut().expect("prepared above"))
    }

    /// Drops the schedules of all but the last entries. The one that was used last keeps its own.
    fn drop_old_schedules(&mut self) {
        let last = self.uses;
        loop {
            let all = self.groups.iter_mut().flat_map(|(_, kept)| kept);
            let with = all.filter(|entry| entry.used == last || entry.prepared.iter().any(Option::is_some));
            let (mut entries, mut runs, mut oldest) = (0, 0, None::<&mut KeptEntry>);
            for entry in with {
                (entries, runs) = (entries + 1, runs + entry.runs);
                if entry.used != last && oldest.as_ref().is_none_or(|other| entry.used < other.used) {
                    oldest = Some(entry);
                }
            }
            match oldest {
                Some(entry) if entries > PREPARED || runs > PREPARED_RUNS => entry.prepared = [None, None],
                _ => return,
            }
        }
    }
}

/// Forgets the entries that were not used for longest, so that one with so many rows fits.
fn make_room(kept: &mut Vec<KeptEntry>, rows: u64) {
    while kept.len() >= REMEMBERED
        || !kept.is_empty() && kept.iter().map(|entry| entry.rows).sum::<u64>() + rows > REMEMBERED_ROWS
    {
        let oldest = kept.iter().enumerate().min_by_key(|(_, entry)| entry.used).map_or(0, |(at, _)| at);
        kept.remove(oldest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Batch, Dtype, Layout, Mesh, Options, Problem,
        plan::{Circulate, KeyRows},
    };

    /// A plan of two ranks, whose second one receives a share of `rows` rows.
    fn plan(rows: usize) -> Plan {
        let problem = Problem::new(Batch::from_lengths(&[2 * rows]).unwrap(), 1, 1, 4, Dtype::F32);
        let options = Options::new()
            .circulate(Circulate::Keys)
            .circulate_forward(Circulate::Keys)
            .gather(false)
            .key_rows(KeyRows::Listed);
        let builder = Plan::builder(&problem).mesh(Mesh::ring(2).unwrap()).layout(Layout::Contiguous);
        builder.options(options).build().unwrap()
    }

    /// Runs `direction` over every second row below `rows`, on the rank that receives them.
    fn run(all: &mut KeptSteps, plan: &Plan, key: u64, rows: u32, direction: Direction) -> bool {
        let mut exchanged = false;
        let listed = || {
            exchanged = true;
            let incoming = (0..rows / 2).map(|i| (2 * i, 2 * i + 1)).collect();
            Ok((
                ListedRows { incoming: vec![incoming, Vec::new()], outgoing: vec![Vec::new(); 2] },
                u64::from(rows / 2),
            ))
        };
        let place = all.find_or_make((&(0..2), key), (plan, 1), listed).unwrap();
        let prepared = all.prepared(place, (plan, 1), direction).unwrap();
        assert!(prepared.is(plan, Purpose::Attention(direction), false));
        exchanged
    }

    /// Keys of the entries that have schedules.
    fn keys(all: &KeptSteps) -> Vec<u64> {
        let entries = all.groups.iter().flat_map(|(_, kept)| kept);
        let mut list: Vec<_> = entries.filter(|e| e.prepared.iter().any(Option::is_some)).map(|e| e.key).collect();
        list.sort_unstable();
        list
    }

    /// The forward of 64 layers and their backward in reverse: rows are exchanged once for each layer, and never more
    /// than four layers have schedules.
    #[test]
    fn the_last_entries_have_schedules() {
        let (mut all, plan) = (KeptSteps::default(), plan(64));
        for layer in 0..REMEMBERED as u64 {
            assert!(run(&mut all, &plan, layer, 64, Direction::Forward));
            assert_eq!(keys(&all), (layer.saturating_sub(PREPARED as u64 - 1)..=layer).collect::<Vec<_>>());
        }
        for layer in (0..REMEMBERED as u64).rev() {
            assert!(!run(&mut all, &plan, layer, 64, Direction::Backward), "layer {layer} is exchanged again");
            assert!(keys(&all).len() == PREPARED && keys(&all).contains(&layer));
        }
        // An entry whose schedules went has them again, without an exchange.
        assert!(!keys(&all).contains(&40) && !run(&mut all, &plan, 40, 64, Direction::Forward));
        assert!(keys(&all).contains(&40));
        // A new entry takes the place of that which was not used for longest.
        assert!(run(&mut all, &plan, 64, 64, Direction::Forward));
        assert!(run(&mut all, &plan, REMEMBERED as u64 - 1, 64, Direction::Forward));
    }

    /// Schedules of many runs of rows go earlier; that of the run itself stays whatever it has.
    #[test]
    fn schedules_of_many_runs_go_earlier() {
        let rows = PREPARED_RUNS as u32;
        let (mut all, plan) = (KeptSteps::default(), plan(2 * rows as usize));
        let mut keys_after = |key, rows| {
            run(&mut all, &plan, key, rows, Direction::Forward);
            keys(&all)
        };
        assert_eq!(keys_after(1, 64), [1]);
        assert_eq!(keys_after(2, rows), [1, 2]);
        assert_eq!(keys_after(3, rows), [2, 3]);
        assert_eq!(keys_after(4, 64), [3, 4]);
        assert_eq!(keys_after(5, 2 * rows), [5]);
        assert_eq!(keys_after(6, 64), [6]);
    }
}
