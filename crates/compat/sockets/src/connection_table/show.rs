// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Makes the row of a connection.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use tombolo_domain::aside;
use tombolo_layout::connection_table::{self, COUNTS, HIDDEN, STATE, WORDS};
use tombolo_mem::OwnWord;
use tombolo_os::lock::lock;

use super::{ConnectionTable, List, Row};
use crate::{Reason, connection::Connection, direction::Direction, tuple::Tuple};

impl ConnectionTable {
    /// Shows `connection` from now on, if there is room. Returns its row.
    pub fn show(&self, connection: &Connection, tuple: Tuple) -> Option<Row> {
        let list = lock(&self.0).get_or_insert_with(|| aside::lifted(List::new).map(Arc::new)).clone()?;
        let Some(at) = lock(&list.free).pop() else {
            let hidden = list.control.word(HIDDEN);
            hidden.store_release(hidden.load() + 1);
            return None;
        };
        let word = |word| list.control.word(connection_table::place(at.into(), word));
        let [sent, received] = connection.members.counted_both();
        let through = |direction| connection.piped.counted(direction);
        let shown = connection_table::Row {
            addresses: [tuple.own, tuple.peer],
            stage: connection_table::Stage::Candidate,
            // Until a peer has answered.
            reason: Some(if connection.members.is_alone() { Reason::NoPeer } else { Reason::Shared } as u16),
            counts: [sent, through(Direction::Out), received, through(Direction::In)],
        };
        for (value, place) in shown.encode().into_iter().zip(1..WORDS) {
            word(place).store_release(value);
        }
        word(0).store_release(list.serial.fetch_add(1, Ordering::Relaxed) + 1);
        let (state, counts) = (word(STATE), std::array::from_fn(|count| word(COUNTS + count)));
        Some(Row { at, state, counts, own: AtomicBool::new(true), list })
    }
}
