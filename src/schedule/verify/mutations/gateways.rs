// SPDX-License-Identifier: MIT OR Apache-2.0
//! Correct results with the wrong traffic: all-to-alls over nodes in which rows cross more often than needed, or over
//! too few cards.

use super::*;
use crate::schedule::MessageView;
use alloc::string::ToString;
use written_out::messages;

/// Schedules of one level, for a plan whose k, v and their gradients cross by gateways, or whose ring rows are divided
/// among the ranks that hold their head. Each is refused for the rows that cross again, in the order of the ranks that
/// send them.
#[test]
fn rows_that_cross_to_each_reader() {
    let mut caught = 0;
    for s in subjects().iter().filter(|s| s.name.contains("gateways") || s.name.contains("holders")) {
        let Purpose::Attention(direction) = s.purpose else { continue };
        let options = s.plan.options().ranks_per_node(0);
        let one_level = Plan::builder(s.plan.problem())
            .mesh(s.plan.mesh())
            .layout(s.plan.layout())
            .options(options)
            .build()
            .unwrap();
        let schedules: Vec<Schedule> =
            (0..s.schedules.len()).map(|r| Schedule::new(&one_level, r, direction).unwrap()).collect();
        one_level.verify_schedules(&schedules).unwrap();
        let text = s.plan.verify_schedules(&schedules).map(|_| ()).unwrap_err().to_string();
        assert!(text.contains(" node ") && text.contains(" again"), "{}: {text}", s.name);
        caught += 1;
    }
    assert_eq!(caught, 10);
}

/// A gateway receives the rows of one more owner, and passes them on to their former gateway: all rows arrive, and each
/// crosses once, but one card carries more than its part.
#[test]
fn a_gateway_of_too_many_owners() {
    let all = subjects();
    let s = all.iter().find(|s| s.name == "gateways, Forward").unwrap();
    let exchanges = |r: usize| -> Vec<usize> {
        let is = |&i: &usize| matches!(s.listed[r][i], ExpandedOp::Exchange { .. });
        (0..s.listed[r].len()).filter(is).collect()
    };
    let mut listed = Changed::new(s);
    let mut take = |r: usize, exchange: usize, peer: usize, send: bool, last: bool| {
        let list = messages(&mut listed, r, exchanges(r)[exchange]);
        let found = |m: &MessageView| (m.peer, m.send) == (peer, send);
        let at = if last { list.iter().rposition(found) } else { list.iter().position(found) };
        list.remove(at.unwrap())
    };
    // Ranks 0 and 1 are a node, 2 and 3 another. v is the last tensor that rank 1 sends to rank 3, its gateway.
    let sent = take(1, 0, 3, true, true);
    let came = take(3, 0, 1, false, true);
    let passed_on = take(3, 1, 2, true, true);
    let arrived = take(2, 1, 3, false, true);
    assert_eq!(came.view, passed_on.view);
    messages(&mut listed, 1, exchanges(1)[0]).push(MessageView { peer: 2, ..sent });
    messages(&mut listed, 2, exchanges(2)[0]).push(MessageView { peer: 1, ..arrived });
    messages(&mut listed, 2, exchanges(2)[1]).push(MessageView { peer: 3, send: true, ..arrived });
    messages(&mut listed, 3, exchanges(3)[1]).push(MessageView { peer: 2, send: false, ..came });
    let text = proof(s, &listed).and_then(Proof::finish).map(|_| ()).unwrap_err().to_string();
    assert!(text.contains("bytes between nodes 0 and 1 are this rank's"), "{text}");
}
