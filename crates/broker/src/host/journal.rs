// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The order in which the broker's state is written down and the descriptor store forgets what it leaves out (B-16).

use std::{io, path::PathBuf, sync::Arc};

use super::{
    descriptor_store::DescriptorStore,
    schedule::{RETRY, Schedule},
    state::{BrokerState, is_unsaved},
};

/// What of the broker's state outlives it, and where.
#[derive(Debug)]
pub(crate) struct Journal {
    pub folder: PathBuf,
    saved: BrokerState,
    /// The broker's state could not be saved, and that was said.
    is_unsaved: bool,
    /// What the descriptor store is to forget once the broker's state that leaves it out is saved.
    given_up: Vec<String>,
    pub store: Arc<DescriptorStore>,
}

impl Journal {
    /// Of a state as it is saved in `folder`.
    pub fn new(folder: PathBuf, saved: BrokerState, store: DescriptorStore) -> Self {
        Self { folder, saved, is_unsaved: false, given_up: Vec::new(), store: Arc::new(store) }
    }

    /// Writes the state down if it changed.
    pub fn save(&mut self, state: &BrokerState) -> io::Result<()> {
        if *state != self.saved {
            state.save(&self.folder)?;
            self.saved = state.clone();
        }
        if std::mem::take(&mut self.is_unsaved) {
            tracing::info!("the broker's state is saved again");
        }
        std::mem::take(&mut self.given_up).iter().try_for_each(|key| self.store.forget(key))
    }

    /// Writes the state down, which has something no more, and then has the descriptor store forget that.
    pub fn give_up(&mut self, state: &BrokerState, key: String) -> io::Result<()> {
        self.given_up.push(key);
        self.save(state)
    }

    /// Where the state cannot be saved, on a disk that is full for instance, what was to be done is given up for now and tried
    /// again: all that was begun before goes on.
    pub fn defer_unsaved(&mut self, done: io::Result<()>, schedule: &mut Schedule) -> io::Result<()> {
        match done {
            Err(error) if is_unsaved(&error) => {
                if !std::mem::replace(&mut self.is_unsaved, true) {
                    tracing::error!("{error}: nothing new is begun before it can be");
                }
                schedule.remind_after(RETRY);
                Ok(())
            }
            done => done,
        }
    }
}
