// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Shows this process's connections to tools: in memory that others can map and only this process can write. If
//! resources for that are missing, nothing is shown (S-11).

mod show;

use std::sync::{
    Arc, Mutex, OnceLock,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use tombolo_domain::aside::ReservedFd;
use tombolo_layout::connection_table::{self, LEN, MAGIC, MEMORY, ROWS};
use tombolo_mem::{MappedOwnWord, OwnControl, OwnWord};
use tombolo_os::lock::lock;

use crate::{Reason, direction::Direction, stage::Stage, switch::Transport};

/// Connection table of a process, made when there is something to show.
#[derive(Debug, Default)]
pub(crate) struct ConnectionTable(Mutex<Option<Option<Arc<List>>>>);

#[derive(Debug)]
struct List {
    control: OwnControl,
    free: Mutex<Vec<u16>>,
    serial: AtomicU64,
    /// Descriptor by which others find the memory.
    _shown: ReservedFd,
}

/// Row of one connection, once it is due. Nothing is shown before that, or where there was no room.
#[derive(Debug, Default)]
pub(crate) struct ConnectionRow(OnceLock<Option<Row>>);

/// Row of one connection. Dropping it removes the row.
#[derive(Debug)]
pub(crate) struct Row {
    list: Arc<List>,
    at: u16,
    state: MappedOwnWord,
    counts: [MappedOwnWord; 4],
    /// Whether the row is this process's; in a child made by fork it is the parent's.
    own: AtomicBool,
}

impl List {
    fn new() -> Option<Self> {
        let (segment, fd) = tombolo_mem::create_sealed(MEMORY, LEN).ok()?;
        let shown = ReservedFd::new(fd).ok()?;
        let (control, _) = segment.split(LEN);
        control.word(0).store_release(MAGIC);
        Some(Self {
            control,
            free: Mutex::new((0..ROWS as u16).rev().collect()),
            serial: AtomicU64::new(0),
            _shown: shown,
        })
    }
}

impl ConnectionTable {
    /// Forgets the list in a child made by fork: it is the parent's.
    pub fn forget(&self) {
        *lock(&self.0) = None;
    }
}

impl ConnectionRow {
    /// Makes the row with `show`, if that was not done yet.
    pub fn show_once(&self, show: impl FnOnce() -> Option<Row>) {
        self.0.get_or_init(show);
    }

    #[inline]
    fn shown(&self) -> Option<&Row> {
        self.0.get()?.as_ref()
    }

    /// Publishes the present stage and reason, as they have changed.
    pub fn publish_stage(&self, now: impl FnOnce() -> (Stage, Option<Reason>)) {
        if let Some(row) = self.shown() {
            let (stage, reason) = now();
            row.publish_stage(stage, reason);
        }
    }

    /// Publishes the number of bytes that went in this direction by this transport so far.
    #[inline]
    pub fn count(&self, direction: Direction, transport: Transport, bytes: u64) {
        if let Some(row) = self.shown() {
            row.count(direction, transport, bytes);
        }
    }

    /// Gives the row up in a child made by fork: it is the parent's.
    pub fn disown(&self) {
        if let Some(row) = self.shown() {
            row.disown();
        }
    }
}

impl Row {
    /// Publishes the stage and reason, as they have changed.
    pub fn publish_stage(&self, stage: Stage, reason: Option<Reason>) {
        if self.is_own() {
            self.state.store_release(connection_table::state(stage, reason.map(|reason| reason as u16)));
        }
    }

    /// Publishes the number of bytes that went in this direction by this transport so far.
    #[inline]
    pub fn count(&self, direction: Direction, transport: Transport, bytes: u64) {
        if self.is_own() {
            self.counts[2 * direction as usize + transport as usize].store_release(bytes);
        }
    }

    fn is_own(&self) -> bool {
        self.own.load(Ordering::Relaxed)
    }

    /// Gives the row up in a child made by fork: it is the parent's.
    pub fn disown(&self) {
        self.own.store(false, Ordering::Relaxed);
    }
}

impl Drop for Row {
    fn drop(&mut self) {
        if self.is_own() {
            self.list.control.word(connection_table::place(self.at.into(), 0)).store_release(0);
            lock(&self.list.free).push(self.at);
        }
    }
}
