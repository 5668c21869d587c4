// SPDX-License-Identifier: MIT OR Apache-2.0
//! `--check-ring`: every link of the ring, both ways.

use std::time::Duration;

use cpattn::transport::{Transport, local, ring_check::Link};

/// Bytes of the large message: enough for a transfer at full speed, quick over any network.
const BYTES: usize = 4 << 20;

/// Bytes of all large messages of a ring of threads, which have one memory.
const ROOM: usize = 1 << 30;

/// How much slower than the median a link may be without a remark.
const SLOW: f64 = 3.0;

/// On threads.
pub fn threads(world: usize, deadline: Duration) -> Result<bool, String> {
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
    print(world, "threads", bytes, &links);
    Ok(true)
}

/// As this process, at `end`; rank 0 prints.
#[cfg_attr(not(feature = "mpi"), expect(dead_code, reason = "ranks are processes over MPI alone"))]
pub fn process(end: &impl Transport) -> Result<bool, String> {
    let links = Link::check_all(end, BYTES).map_err(|trouble| trouble.to_string())?;
    if end.rank() == 0 {
        print(end.world(), "processes", BYTES, &links);
    }
    Ok(true)
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(f64::NAN)
}

fn print(world: usize, kind: &str, bytes: usize, links: &[Link]) {
    let latency = |link: &Link| link.latency.as_secs_f64() * 1e6;
    let rate = |link: &Link| link.bytes_per_second / 1e9;
    let usual = (median(links.iter().map(latency).collect()), median(links.iter().map(rate).collect()));
    println!("ring of {world} {kind}, there and back, {} KiB a message", bytes >> 10);
    println!("{:>14}{:>14}{:>12}", "link", "latency µs", "GB/s");
    let mut slow = 0;
    for link in links {
        let late = latency(link) > SLOW * usual.0 || rate(link) < usual.1 / SLOW;
        slow += usize::from(late);
        let name = format!("{} → {}", link.from, link.to);
        println!("{name:>14}{:>14.1}{:>12.2}{}", latency(link), rate(link), if late { "   slow" } else { "" });
    }
    match slow {
        0 => println!("all {} links work", links.len()),
        _ => println!(
            "all {} links work, {slow} of them {SLOW} times slower than the median; try: run again on idle hosts, then see which \
             network interface the hosts of a slow link use and whether they share a switch with others",
            links.len()
        ),
    }
}
