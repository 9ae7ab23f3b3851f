// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What this process shows of its connections to whoever looks from outside: memory that others can map and nobody else can
//! write. What cannot be had for it is not shown (S-11).

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

/// The list of a process, made when there is something to show.
#[derive(Debug, Default)]
pub(crate) struct ConnectionTable(Mutex<Option<Option<Arc<List>>>>);

#[derive(Debug)]
struct List {
    control: OwnControl,
    free: Mutex<Vec<u16>>,
    serial: AtomicU64,
    /// What leads others to the memory.
    _shown: ReservedFd,
}

/// The row of one connection, once it is due. Where there was no room for it, and before, nothing is shown.
#[derive(Debug, Default)]
pub(crate) struct ConnectionRow(OnceLock<Option<Row>>);

/// The row of one connection; it goes with this.
#[derive(Debug)]
pub(crate) struct Row {
    list: Arc<List>,
    at: u16,
    state: MappedOwnWord,
    counts: [MappedOwnWord; 4],
    /// In a child made by fork the row is its parent's.
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
    /// In a child made by fork: the list is its parent's.
    pub fn forget(&self) {
        *lock(&self.0) = None;
    }
}

impl ConnectionRow {
    /// It is due: `show` makes it, if that was not done yet.
    pub fn show_once(&self, show: impl FnOnce() -> Option<Row>) {
        self.0.get_or_init(show);
    }

    #[inline]
    fn shown(&self) -> Option<&Row> {
        self.0.get()?.as_ref()
    }

    /// What is told of the connection changed, and is this now.
    pub fn publish_stage(&self, now: impl FnOnce() -> (Stage, Option<Reason>)) {
        if let Some(row) = self.shown() {
            let (stage, reason) = now();
            row.publish_stage(stage, reason);
        }
    }

    /// So many bytes went one way by now.
    #[inline]
    pub fn count(&self, direction: Direction, transport: Transport, bytes: u64) {
        if let Some(row) = self.shown() {
            row.count(direction, transport, bytes);
        }
    }

    /// In a child made by fork: what is shown is its parent's.
    pub fn disown(&self) {
        if let Some(row) = self.shown() {
            row.disown();
        }
    }
}

impl Row {
    /// What is told of the connection changed.
    pub fn publish_stage(&self, stage: Stage, reason: Option<Reason>) {
        if self.is_own() {
            self.state.store_release(connection_table::state(stage, reason.map(|reason| reason as u16)));
        }
    }

    /// So many bytes went one way by now.
    #[inline]
    pub fn count(&self, direction: Direction, transport: Transport, bytes: u64) {
        if self.is_own() {
            self.counts[2 * direction as usize + transport as usize].store_release(bytes);
        }
    }

    fn is_own(&self) -> bool {
        self.own.load(Ordering::Relaxed)
    }

    /// In a child made by fork: the row is its parent's.
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
