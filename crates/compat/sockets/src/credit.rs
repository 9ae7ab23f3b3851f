// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Which connections are joined before they have moved as much as pays for that.
//!
//! To join a connection costs its ends about what 64 round trips over TCP cost. Whoever waits until it has moved as much gives that
//! away on each that lasts, and whoever never waits loses three times what a short one takes. So one is joined on credit, as long as
//! its service has some. That is lost where it ends before it has paid, and each that pays gives some back (ADR 0095).

use std::sync::{
    OnceLock,
    atomic::{AtomicU64, Ordering},
};

use tombolo_mem::Common;

use crate::{connection::Connection, kernel::Kernel};

/// Connections that are joined on credit at once, of a service of which nothing is known: the most credit that one ever has.
const CREDIT: u64 = 64;
/// What one costs that ends before it has paid, its one at the beginning included. As much is earned by one that pays.
const SHORT: u64 = 4;

/// What the services of a process, and of those that it forks later, have spent.
#[derive(Debug, Default)]
pub(crate) struct Credits {
    /// A word for each service, which several may share; made when it is first needed. Without memory for it all have credit.
    spent: OnceLock<Option<Common>>,
}

impl Credits {
    /// Whether the other end of a connection is looked for: from when it has moved what the user said (`after`), or what pays for a
    /// join, or what is promising while its service has credit.
    pub fn is_sought(&self, kernel: &dyn Kernel, connection: &Connection, after: Option<u64>) -> bool {
        let worth = &connection.worth;
        let counted = connection.members.counted_both();
        // One whose peer never comes shows what it is worth as well.
        self.note_worth(kernel, connection, counted);
        // One without a port is found out to be none by who looks for its peer.
        let has_credit = || Service::of(kernel, connection).is_none_or(|service| self.spend(service));
        if !worth.is_sought()
            && worth.is_promising(counted, after)
            && (after.is_some() || worth.has_paid() || has_credit())
        {
            worth.set_sought();
        }
        worth.is_sought()
    }

    /// A connection has moved so much in the two directions: one that pays for a join gives its service credit, once.
    pub fn note_worth(&self, kernel: &dyn Kernel, connection: &Connection, counted: [u64; 2]) {
        if !connection.worth.has_paid()
            && connection.worth.pays_now(counted)
            && let Some(service) = Service::of(kernel, connection)
        {
            self.earn(service);
        }
    }

    /// A connection ends. Where that is before it has paid for the search, its service has less credit.
    pub fn write_off(&self, kernel: &dyn Kernel, connection: &Connection) {
        if connection.worth.is_sought()
            && !connection.worth.has_paid()
            && let Some(service) = Service::of(kernel, connection)
        {
            self.lose(service);
        }
    }

    /// Makes the page, if nobody has: before a fork, so that both processes have one.
    pub fn page(&self) -> Option<&Common> {
        self.spent.get_or_init(|| Common::new().ok()).as_ref()
    }

    /// Whether one more connection of this service may be joined on credit, which that costs.
    fn spend(&self, service: Service) -> bool {
        let Some(page) = self.page() else { return true };
        let one_more = |spent| (spent < CREDIT).then_some(spent + 1);
        service.word(page).fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).is_ok()
    }

    /// A connection of this service that was joined on credit, or looked for its peer, ended before it had paid.
    fn lose(&self, service: Service) {
        self.change(service, |spent| (spent + SHORT - 1).min(CREDIT));
    }

    /// A connection of this service has moved as much as pays for a join.
    fn earn(&self, service: Service) {
        self.change(service, |spent| spent.saturating_sub(SHORT));
    }

    /// Where nothing was ever spent there is nothing to lose or to give back.
    fn change(&self, service: Service, to: impl Fn(u64) -> u64) {
        if let Some(Some(page)) = self.spent.get() {
            let _ = service.word(page).fetch_update(Ordering::Relaxed, Ordering::Relaxed, |spent| Some(to(spent)));
        }
    }
}

/// What a connection was made to, as far as credit goes: a port, and which end of it this is.
#[derive(Clone, Copy, Debug)]
struct Service {
    port: u16,
    /// This end connected, the other accepted.
    dialled: bool,
}

impl Service {
    fn of(kernel: &dyn Kernel, connection: &Connection) -> Option<Self> {
        let (fd, dialled) = (connection.descriptors.fd(), connection.dialled);
        connection.identity.service_port(kernel, fd, dialled).map(|port| Self { port, dialled })
    }

    fn word(self, page: &Common) -> &AtomicU64 {
        let words = page.words();
        // Neighbouring ports have words of their own.
        &words[(2 * usize::from(self.port) + usize::from(self.dialled)) % words.len()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WEB: Service = Service { port: 80, dialled: false };

    /// Joins connections on credit for as long as there is some, and says how many; each of them ends as `end` has it.
    fn spend_all(credits: &Credits, end: impl Fn(&Credits)) -> usize {
        (0..1000).take_while(|_| credits.spend(WEB)).inspect(|_| end(credits)).count()
    }

    #[test]
    fn service_of_which_nothing_is_known_has_credit_for_64_at_once_or_16_that_end_soon() {
        assert_eq!(spend_all(&Credits::default(), |_| {}), 64);
        let credits = Credits::default();
        credits.earn(WEB);
        credits.lose(WEB);
        assert_eq!(spend_all(&credits, |credits| credits.lose(WEB)), 16, "what was never spent counts for nothing");
        assert!(credits.spend(Service { port: 81, ..WEB }) && credits.spend(Service { dialled: true, ..WEB }));
        credits.earn(WEB);
        assert_eq!(spend_all(&credits, |credits| credits.lose(WEB)), 1, "each that lasts pays for a short one");
    }

    #[test]
    fn service_whose_connections_last_always_has_credit_and_never_more_than_at_first() {
        let credits = Credits::default();
        assert_eq!(spend_all(&credits, |credits| credits.earn(WEB)), 1000);
        (0..1000).for_each(|_| credits.earn(WEB));
        assert_eq!(spend_all(&credits, |_| {}), 64);
    }
}
