// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Serves the configured accounts of the host, and admits their programs.

use std::{collections::BTreeMap, io, os::fd::OwnedFd, sync::Arc};

use tombolo_control::{Life, Message, Name, code};

use super::{
    accounts::{
        Local,
        stored::{self, Key, StoredConnection, StoredConnections},
    },
    control_socket::turn_away,
    descriptor_store::DescriptorStore,
    domains::Domains,
    link_memory::LinkMemory,
    schedule::Schedule,
};
use crate::config::checked_name;

/// What is needed to serve accounts.
#[derive(Debug)]
pub(crate) struct Programs {
    /// Connections of programs of the host that an earlier broker left, until their account takes them up.
    connections: BTreeMap<Key, Vec<StoredConnection>>,
    store: Arc<DescriptorStore>,
}

impl Programs {
    pub fn new(store: Arc<DescriptorStore>) -> Self {
        Self { connections: BTreeMap::new(), store }
    }

    /// Restores the connections that an earlier broker left on memory that links still have, from what the descriptor
    /// store kept.
    pub fn restore_connections(&mut self, kept: &mut BTreeMap<String, Vec<OwnedFd>>, domains: &Domains) {
        let connections =
            kept.extract_if(.., |key, _| stored::parse(key).is_some_and(|(link, _)| domains.state.has(link)));
        for (key, descriptors) in connections.collect::<Vec<_>>() {
            if let Some((link, made)) = stored::parse(&key)
                && let Some(connection) = StoredConnection::from_descriptors(made, descriptors)
            {
                self.connections.entry(link).or_default().push(connection);
            }
        }
    }

    /// Serves the configured accounts, and no others.
    pub fn serve_accounts(
        &mut self,
        domains: &mut Domains,
        memory: &mut LinkMemory,
        schedule: &Schedule,
    ) -> io::Result<()> {
        let gone: Vec<_> = domains.locals.keys().filter(|name| !domains.config.is_local(name)).cloned().collect();
        gone.iter().for_each(|name| dismiss(name, domains));
        let given =
            domains.state.accounts.iter().filter(|(name, user)| domains.config.accounts.get(*name) != Some(*user));
        for name in given.map(|(name, _)| name.clone()).collect::<Vec<_>>() {
            dismiss(&name, domains);
            // Programs of another user may have the account's memory, even from before this broker. The programs of the
            // present user must not get it.
            let links: Vec<_> = domains.state.links_of(&name).map(|(number, _)| number).collect();
            links.into_iter().for_each(|number| memory.retire_memory(number, domains));
        }
        domains.state.accounts.clone_from(&domains.config.accounts);
        self.end_orphans(domains);
        for name in domains.config.accounts.keys().map(String::as_str).chain([domains.config.host.as_str()]) {
            if !domains.locals.contains_key(name) {
                let mine = |key: &Key| domains.state.links.get(&key.0).is_some_and(|link| link.side(name).is_some());
                let kept = StoredConnections::new(
                    Arc::clone(&self.store),
                    self.connections.extract_if(.., |key, _| mine(key)).collect(),
                );
                let local = Local::start(&checked_name(name), domains.config.window, kept, &schedule.events)?;
                domains.locals.insert(name.into(), local);
            }
        }
        Ok(())
    }

    /// Ends connections that an earlier broker left and no account will take up: there is no such account any more, or
    /// their link has other memory.
    fn end_orphans(&mut self, domains: &Domains) {
        let (state, config) = (&domains.state, &domains.config);
        let has_account = |key: &Key| state.links[&key.0].ends.iter().any(|end| config.is_local(end));
        let orphans = self.connections.extract_if(.., |key, _| !state.has(*key) || !has_account(key));
        for (link, connections) in orphans.collect::<Vec<_>>() {
            stored::end_connections(Some(&self.store), link, connections);
        }
    }
}

/// Ends what programs have of a domain that is no account any more, or is another user's.
fn dismiss(name: &str, domains: &mut Domains) {
    if let Some(local) = domains.locals.remove(name) {
        local.dismiss();
    }
    // Nobody would report that its programs have released memory. The programs keep what they map.
    domains.state.quarantine.iter_mut().for_each(|old| _ = old.held_by.remove(name));
}

/// Tells programs that a machine has gone while no broker was there. Their accounts are not told of a link with it
/// (V-7).
pub(crate) fn report_lost_peers(domains: &Domains) {
    for (account, local) in &domains.locals {
        let is_lost = |(number, generation): Key| {
            let link = domains.state.links.get(&number).filter(|_| domains.state.has((number, generation)));
            link.is_some_and(|link| link.ends.iter().any(|end| end != account && domains.is_gone(end)))
        };
        let (link, generation, life) = (0, 0, Life::DomainGone);
        local.kept.tell_programs(&Message::Life { link, generation, life }, is_lost);
    }
}

/// Lets an administrator see what the broker of an account tells (B-20).
pub(crate) fn admit_administrator(client: OwnedFd, account: &Name, domains: &Domains) {
    match domains.locals.get(account.as_str()) {
        Some(local) => local.admit(&client),
        None => {
            let why = format!("{account} is no account of this host");
            turn_away(client, code::NOT_FOUND, why);
        }
    }
}

/// Hands a client over to the broker of its account (B-15).
pub(crate) fn admit_program(program: OwnedFd, user: u32, domains: &Domains) {
    match domains.config.account_of(user, rustix::process::geteuid().as_raw()).and_then(|name| domains.locals.get(name))
    {
        Some(local) => local.admit(&program),
        None => {
            let path = domains.config.path.display();
            let why = format!("user {user} is no domain: {path} needs an [account.NAME] with user = {user}");
            turn_away(program, code::DENIED, why);
        }
    }
}
