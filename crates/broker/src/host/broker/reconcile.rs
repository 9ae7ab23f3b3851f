// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reconciles memory, regions, doorbells and what the guests are told with the broker's state. Each step changes only
//! what does not agree with the state yet.

use std::{io, time::Instant};

use tombolo_control::Name;

use crate::{
    config::checked_name,
    host::{broker::Broker, event::Asker, guest_view::GuestView},
};

impl Broker {
    /// Reconciles everything with all events received so far.
    ///
    /// # Errors
    /// The descriptor store is gone.
    pub fn reconcile(&mut self) -> io::Result<()> {
        let began = Instant::now();
        self.schedule.pace.begin();
        let settled = self.reconcile_all();
        self.schedule.pace.finish(began, Instant::now());
        if self.schedule.pace.is_due() {
            // A report arrived meanwhile.
            self.schedule.remind_after(self.schedule.pace.rest(Instant::now()));
        }
        self.journal.defer_unsaved(settled, &mut self.schedule)
    }

    /// Reconciles after reports of guests and QEMUs, or schedules that for when it is their turn (B-17).
    ///
    /// # Errors
    /// The descriptor store is gone.
    pub fn reconcile_in_turn(&mut self) -> io::Result<()> {
        if !self.schedule.pace.is_due() {
            return Ok(());
        }
        let rest = self.schedule.pace.rest(Instant::now());
        if rest.is_zero() {
            return self.reconcile();
        }
        self.schedule.remind_after(rest);
        Ok(())
    }

    fn reconcile_all(&mut self) -> io::Result<()> {
        self.reconcile_links()?;
        self.migrations.watch_machines(&self.domains);
        self.migrations.advance_departures(&self.domains, &mut self.leaving, &mut self.schedule);
        self.remove_left_links()?;
        for link in self.domains.state.links.keys().copied().collect::<Vec<_>>() {
            if !self.leaving.contains(link) {
                self.memory.renew_memory(link, &mut self.domains, &self.migrations, &mut self.schedule);
            }
            self.memory.begin_sealing(link, &self.domains, &mut self.schedule);
            let up = self.domains.is_up(link);
            if let Some(link) = self.domains.state.links.get_mut(&link) {
                link.up = up;
            }
        }
        self.journal.save(&self.domains.state)?;
        self.memory.update_plugs(&self.domains, &self.migrations);
        self.doorbells().update_doorbells()?;
        self.memory.update_relays(&self.domains, &mut self.schedule);
        self.update_guests();
        self.migrations.mute_departing(&mut self.domains);
        self.memory.free_returned(&mut self.domains, &mut self.leaving, &mut self.journal, &mut self.schedule)?;
        self.journal.save(&self.domains.state)
    }

    /// Adds the links that the configuration has. Begins to remove those that it does not allow, or had and has no more
    /// (B-13).
    fn reconcile_links(&mut self) -> io::Result<()> {
        for (ends, size) in self.domains.config.links.clone() {
            if self.domains.state.link_between(&ends[0], &ends[1]).is_none()
                && let Some((_, why)) = self.domains.insert_link(ends.each_ref(), size, true, &mut self.journal)?
                && self.unmade.insert(ends.clone())
            {
                tracing::warn!("no link between {} and {}: {why}", ends[0], ends[1]);
            }
        }
        let allowed = |end: &String| self.domains.config.knows(end);
        let forbidden = self.domains.state.links.iter().filter(|(_, link)| {
            let [a, b] = &link.ends;
            let (a_name, b_name) = (checked_name(a), checked_name(b));
            let listed = |(ends, _): &([Name; 2], u64)| ends.contains(&a_name) && ends.contains(&b_name);
            !allowed(a)
                || !allowed(b)
                || !self.domains.config.may_link(&a_name, &b_name)
                || (link.configured && !self.domains.config.links.iter().any(listed))
        });
        for link in forbidden.map(|(number, _)| *number).collect::<Vec<_>>() {
            if !self.leaving.contains(link) {
                tracing::info!("link {link} is not configured or not allowed any more: it goes");
                self.begin_removal(link, "no rule allows it any more", None)?;
            }
        }
        Ok(())
    }

    /// Begins to remove a link. `asker` is answered once it is gone. If no domain is to be told, the link is removed at
    /// once.
    pub(super) fn begin_removal(&mut self, number: u32, why: &str, asker: Option<Asker>) -> io::Result<()> {
        self.leaving.begin_removal(number, self.domains.config.leave, why, asker);
        self.remove_left_links()
    }

    /// Removes links that all domains have left, or had long enough to leave.
    fn remove_left_links(&mut self) -> io::Result<()> {
        for number in self.leaving.numbers() {
            let Some((leaving, open)) = self.leaving.remove_due(number, &self.domains, &mut self.schedule) else {
                continue;
            };
            let removed = match self.domains.state.links.get(&number).map(|link| (link.ends.clone(), link.has_memory)) {
                Some((ends, has_memory)) => {
                    // A link that was left already is not counted again.
                    if has_memory {
                        self.migrations.count_cut(&ends, &open);
                    }
                    // Its memory waits until it is given back. A link that stays gets other memory once its domains are
                    // there again.
                    self.memory.retire_memory(number, &mut self.domains);
                    if !leaving.stays {
                        self.domains.state.links.remove(&number);
                        self.memory.forget_link(number);
                        self.storms.forget_link(number);
                    }
                    self.journal.save(&self.domains.state)
                }
                None => Ok(()),
            };
            leaving.answer(&removed);
            removed?;
        }
        Ok(())
    }

    /// Tells each guest and each account what it does not know of its links. Messages that they send meanwhile are
    /// handled as usual; the next pass acts on them (B-7).
    fn update_guests(&mut self) {
        let leaving = self.leaving.waits();
        let domains = &self.domains;
        for name in domains.vms.keys().chain(domains.locals.keys()).cloned().collect::<Vec<_>>() {
            let domains = &self.domains;
            let Some(guest) = domains.guest_of(&name) else { continue };
            let view = GuestView { name: &name, guest, domains, leaving: &leaving };
            let links = view.links();
            let addresses = view.addresses(&links);
            let numbers = domains.config.numbers(&name, links.values().map(|link| link.peer.clone()));
            let nets = domains.config.nets_of(&name);
            let Some(guest) = self.domains.guest_of_mut(&name) else { continue };
            let said = guest.send_changes(&links, numbers, &leaving);
            if guest.send_addresses(addresses) | guest.send_nets(nets) | said {
                self.exchange_messages(&name, 1);
            }
        }
    }
}

#[cfg(test)]
mod tests;
