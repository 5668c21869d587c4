// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cpattn ring`: every link of the ring, both ways.

use std::time::Duration;

use clap::Args;
use cpattn::transport::{Transport, local, ring_check::Link};

use crate::{
    json::{Json, JsonOption},
    options::{DeadlineOption, TransportOption, TransportRule, WorldOption},
};

/// Check the links of a ring of ranks: a stamped message over each, both ways.
///
/// Prints which link fails, or how fast each is.
#[derive(Args, Debug)]
pub struct Arguments {
    #[command(flatten)]
    world: WorldOption,
    #[command(flatten)]
    transport: TransportOption,
    #[command(flatten)]
    deadline: DeadlineOption,
    #[command(flatten)]
    json: JsonOption,
}

/// Bytes of the large message: enough for a transfer at full speed, quick over any network.
const BYTES: usize = 4 << 20;

/// Bytes of all large messages of a ring of threads, which have one memory.
const ROOM: usize = 1 << 30;

/// How much slower than the median a link may be without a remark.
const SLOW: f64 = 3.0;

pub fn main(arguments: &Arguments) -> Result<bool, String> {
    let Arguments { world, transport, deadline, json } = arguments;
    let deadline = Duration::from_secs_f64(deadline.deadline);
    match transport.transport {
        TransportRule::Local => threads(world.threads(8)?, deadline, json),
        #[cfg(feature = "mpi")]
        TransportRule::Mpi => crate::run::check_ring(deadline, world.world, json),
        #[cfg(not(feature = "mpi"))]
        TransportRule::Mpi => Err(crate::options::NO_MPI.into()),
    }
}

/// On threads.
fn threads(world: usize, deadline: Duration, json: &JsonOption) -> Result<bool, String> {
    let ends = local::group(world, deadline).map_err(|e| e.to_string())?;
    let bytes = BYTES.min(ROOM / world);
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = ends.iter().map(|end| scope.spawn(|| Link::check_all(end, bytes))).collect();
        threads.into_iter().map(|t| t.join().map_err(|_| "a rank panicked".to_owned())).collect()
    });
    let mut links = Vec::new();
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        match outcome? {
            Ok(known) if rank == 0 => links = known,
            Ok(_) => {}
            Err(trouble) => return Err(trouble.to_string()),
        }
    }
    print(world, "threads", bytes, &links, json)?;
    Ok(true)
}

/// As this process, at `end`; rank 0 prints.
#[cfg_attr(not(feature = "mpi"), expect(dead_code, reason = "ranks are processes over MPI alone"))]
pub fn process(end: &impl Transport, json: &JsonOption) -> Result<bool, String> {
    let links = Link::check_all(end, BYTES).map_err(|trouble| trouble.to_string())?;
    if end.rank() == 0 {
        print(end.world(), "processes", BYTES, &links, json)?;
    }
    Ok(true)
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(f64::NAN)
}

fn print(world: usize, kind: &str, bytes: usize, links: &[Link], json: &JsonOption) -> Result<(), String> {
    let text = json.text();
    let latency = |link: &Link| link.latency.as_secs_f64() * 1e6;
    let rate = |link: &Link| link.bytes_per_second / 1e9;
    let usual = (median(links.iter().map(latency).collect()), median(links.iter().map(rate).collect()));
    text.line(format_args!("ring of {world} {kind}, there and back, {} KiB a message", bytes >> 10))?;
    text.line(format_args!("{:>14}{:>14}{:>12}", "link", "latency µs", "GB/s"))?;
    let mut slow = 0;
    for link in links {
        let late = latency(link) > SLOW * usual.0 || rate(link) < usual.1 / SLOW;
        slow += usize::from(late);
        let name = format!("{} → {}", link.from, link.to);
        let mark = if late { "   slow" } else { "" };
        text.line(format_args!("{name:>14}{:>14.1}{:>12.2}{mark}", latency(link), rate(link)))?;
    }
    match slow {
        0 => text.line(format_args!("all {} links work", links.len()))?,
        _ => text.line(format_args!(
            "all {} links work, {slow} of them {SLOW} times slower than the median; try: run again on idle hosts, then see which \
             network interface the hosts of a slow link use and whether they share a switch with others",
            links.len()
        ))?,
    }
    json.write(|| {
        let of = |link: &Link| {
            Json::Object(vec![
                ("from", Json::count(link.from)),
                ("to", Json::count(link.to)),
                ("latency_seconds", Json::Number(link.latency.as_secs_f64())),
                ("bytes_per_second", Json::Number(link.bytes_per_second)),
            ])
        };
        let links = Json::list(links.iter().map(of));
        Json::Object(vec![("world", Json::count(world)), ("message_bytes", Json::count(bytes)), ("links", links)])
    })
}
