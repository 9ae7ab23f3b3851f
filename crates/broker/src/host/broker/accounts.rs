// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The accounts of the host: those that are configured are served, and their programs let in.

use std::{io, os::fd::OwnedFd, sync::Arc};

use tombolo_control::{Life, Message, Name, code};

use crate::{
    config::checked_name,
    host::{
        accounts::{
            Local,
            stored::{self, Key, StoredConnections},
        },
        broker::Broker,
        control_socket::turn_away,
        guest::GuestRequest,
    },
};

impl Broker {
    /// Serves the accounts that are configured, and no others.
    pub(crate) fn settle_accounts(&mut self) -> io::Result<()> {
        let gone: Vec<_> = self.locals.keys().filter(|name| !self.config.is_local(name)).cloned().collect();
        gone.iter().for_each(|name| self.dismiss(name));
        let given = self.book.accounts.iter().filter(|(name, user)| self.config.accounts.get(*name) != Some(*user));
        for name in given.map(|(name, _)| name.clone()).collect::<Vec<_>>() {
            self.dismiss(&name);
            // What programs of another user have of it, also from before this broker, is not for those that come now.
            let links: Vec<_> = self.book.links_of(&name).map(|(number, _)| number).collect();
            links.into_iter().for_each(|number| self.retire(number));
        }
        self.book.accounts.clone_from(&self.config.accounts);
        self.end_orphans();
        for name in self.config.accounts.keys().map(String::as_str).chain([self.config.host.as_str()]) {
            if !self.locals.contains_key(name) {
                let mine = |key: &Key| self.book.links.get(&key.0).is_some_and(|link| link.side(name).is_some());
                let kept = StoredConnections::new(
                    Arc::clone(&self.journal.holder),
                    self.calls.extract_if(.., |key, _| mine(key)).collect(),
                );
                let local = Local::start(&checked_name(name), self.config.slice, kept, &self.schedule.events)?;
                self.locals.insert(name.into(), local);
            }
        }
        Ok(())
    }

    /// Ends what programs have of a domain that is no account any more, or another user's.
    fn dismiss(&mut self, name: &str) {
        if let Some(local) = self.locals.remove(name) {
            local.dismiss();
        }
        // Nobody would say that its programs let go. What they map is theirs.
        self.book.quarantine.iter_mut().for_each(|old| _ = old.held_by.remove(name));
    }

    /// Ends calls that an earlier broker left and no account will take up: it is none any more, or the memory is not that of its link.
    fn end_orphans(&mut self) {
        let (book, config) = (&self.book, &self.config);
        let has_account = |key: &Key| book.links[&key.0].ends.iter().any(|end| config.is_local(end));
        let orphans = self.calls.extract_if(.., |key, _| !book.has(*key) || !has_account(key));
        for (link, calls) in orphans.collect::<Vec<_>>() {
            stored::end_calls(Some(&self.journal.holder), link, calls);
        }
    }

    /// V-7. Programs hear of a machine that went while no broker was there: their accounts are not told of a link with it.
    pub(crate) fn tell_of_the_lost(&self) {
        for (account, local) in &self.locals {
            let is_lost = |(number, generation): Key| {
                let link = self.book.links.get(&number).filter(|_| self.book.has((number, generation)));
                link.is_some_and(|link| link.ends.iter().any(|end| end != account && self.is_gone(end)))
            };
            let (link, generation, life) = (0, 0, Life::DomainGone);
            local.kept.tell_programs(&Message::Life { link, generation, life }, is_lost);
        }
    }

    /// The same as [`converse`](Self::converse) with the broker of an account. It is this process, so it is believed.
    pub(crate) fn converse_with_account(&mut self, name: &str, limit: usize) {
        let Some(local) = self.locals.get_mut(name) else { return };
        let before = local.guest.standing();
        let heard = match local.guest.turn(&local.boxes, &self.config.host, limit) {
            Ok((heard, ring)) => {
                if !heard.is_empty() || local.guest.standing() != before {
                    self.schedule.pace.request();
                }
                if ring {
                    local.notify();
                }
                heard
            }
            Err(error) => {
                tracing::error!(stranger = name, "{name}: its boxes cannot be reached: {error}");
                return;
            }
        };
        for heard in heard {
            match heard {
                GuestRequest::Storm(link) => self.storm(name, link),
                GuestRequest::Released(link, generation) => self.released(name, link, generation),
                GuestRequest::Hello(_) | GuestRequest::Left | GuestRequest::Moved => {}
            }
        }
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
