// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Orders the steps in which the broker's state is saved and the descriptor store forgets what the state leaves out
//! (B-16).

use std::{io, path::PathBuf, sync::Arc};

use super::{
    descriptor_store::DescriptorStore,
    schedule::{RETRY, Schedule},
    state::{BrokerState, is_unsaved},
};

/// What outlives the broker: its saved state, and the descriptor store.
#[derive(Debug)]
pub(crate) struct Journal {
    pub folder: PathBuf,
    saved: BrokerState,
    /// Whether the broker's state could not be saved, and that was logged.
    is_unsaved: bool,
    /// Names that the descriptor store is to forget once a state without them is saved.
    given_up: Vec<String>,
    pub store: Arc<DescriptorStore>,
}

impl Journal {
    /// Starts from the state that is saved in `folder`.
    pub fn new(folder: PathBuf, saved: BrokerState, store: DescriptorStore) -> Self {
        Self { folder, saved, is_unsaved: false, given_up: Vec::new(), store: Arc::new(store) }
    }

    /// Saves the state if it has changed.
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

    /// Saves a state that leaves something out, and then has the descriptor store forget it.
    pub fn give_up(&mut self, state: &BrokerState, key: String) -> io::Result<()> {
        self.given_up.push(key);
        self.save(state)
    }

    /// Defers work if the state cannot be saved, for instance on a full disk. The work is given up for now and tried
    /// again. All that was begun before continues.
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
