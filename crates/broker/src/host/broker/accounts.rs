// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The accounts of the host: those that are configured are served, and their programs let in.

use std::{io, os::fd::OwnedFd, sync::Arc};

use tombolo_control::{Name, code};

use crate::{
    config::checked_name,
    host::{
        accounts::{
            Local,
            stored::{Key, StoredConnections},
        },
        broker::Broker,
        control_socket::turn_away,
        guest::GuestRequest,
    },
};

impl Broker {
    /// Serves the accounts that are configured, and no others.
    pub(crate) fn settle_accounts(&mut self) -> io::Result<()> {
        let gone = self.locals.extract_if(.., |name, _| !self.config.is_local(name));
        for (name, _) in gone.collect::<Vec<_>>() {
            // Nobody would say that its programs let go. What they map is theirs.
            self.book.quarantine.iter_mut().for_each(|old| _ = old.held_by.remove(&name));
        }
        for name in self.config.accounts.keys().map(String::as_str).chain([self.config.host.as_str()]) {
            if !self.locals.contains_key(name) {
                let mine = |key: &Key| self.book.links.get(&key.0).is_some_and(|link| link.side(name).is_some());
                let kept = StoredConnections::new(
                    Arc::clone(&self.holder),
                    self.calls.extract_if(.., |key, _| mine(key)).collect(),
                );
                let local = Local::start(&checked_name(name), self.config.slice, kept, &self.events)?;
                self.locals.insert(name.into(), local);
            }
        }
        Ok(())
    }

    /// The same as [`converse`](Self::converse) with the broker of an account. It is this process, so it is believed.
    pub(crate) fn converse_with_account(&mut self, name: &str, limit: usize) -> bool {
        let Some(local) = self.locals.get_mut(name) else { return false };
        let heard = match local.guest.turn(&local.boxes, &self.config.host, limit) {
            Ok((heard, ring)) => {
                if ring {
                    local.notify();
                }
                heard
            }
            Err(error) => {
                tracing::error!(stranger = name, "{name}: its boxes cannot be reached: {error}");
                return false;
            }
        };
        let any = !heard.is_empty();
        for heard in heard {
            match heard {
                GuestRequest::Storm(link) => self.storm(name, link),
                GuestRequest::Released(link, generation) => self.released(name, link, generation),
                GuestRequest::Hello(_) | GuestRequest::Left => {}
            }
        }
        any
    }

    /// B-20. An administrator sees what the broker of an account tells.
    pub(crate) fn entered(&self, client: OwnedFd, account: &Name) {
        match self.locals.get(account.as_str()) {
            Some(local) => local.admit(&client),
            None => {
                let why = format!("{account} is no account of this host");
                turn_away(client, code::NOT_FOUND, why);
            }
        }
    }

    /// B-15. Whoever comes in is passed on to the broker of its account.
    pub(crate) fn knocked(&self, program: OwnedFd, user: u32) {
        match self.config.account_of(user, rustix::process::geteuid().as_raw()).and_then(|name| self.locals.get(name)) {
            Some(local) => local.admit(&program),
            None => {
                let path = self.config_path.display();
                let why = format!("user {user} is no domain: {path} needs an [account.NAME] with user = {user}");
                turn_away(program, code::DENIED, why);
            }
        }
    }
}
