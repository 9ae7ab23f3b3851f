// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Decides which connections are joined before they have moved enough to pay for that.
//!
//! Joining a connection costs its endpoints about as much as 64 round trips over TCP. A process that first waits for as
//! much traffic gives up the gain from it on each connection that lasts. One that never waits loses three times what a
//! short connection takes. So a connection is joined on credit, as long as its service has some. The credit is lost if
//! it ends before it has paid, and each one that pays gives some back (ADR 0095).

use std::sync::{
    OnceLock,
    atomic::{AtomicU64, Ordering},
};

use tombolo_mem::Common;

use crate::{connection::Connection, kernel::Kernel};

/// Number of connections that are joined on credit at once, for an unknown service: the most credit that a service ever
/// has.
const CREDIT: u64 = 64;
/// Credit that a connection costs which ends before it has paid, including the one spent at its beginning. One that
/// pays earns as much.
const SHORT: u64 = 4;

/// Credit that the services of a process, and of those that it forks later, have spent.
#[derive(Debug, Default)]
pub(crate) struct Credits {
    /// One word for each service, which several may share; made when first needed. If there is no memory for it, all
    /// services have credit.
    spent: OnceLock<Option<Common>>,
}

impl Credits {
    /// Returns whether to search for the peer of a connection. The search begins once it has moved as much as the user
    /// set (`after`), or as pays for a join, or enough to be promising while its service has credit.
    pub fn is_sought(&self, kernel: &dyn Kernel, connection: &Connection, after: Option<u64>) -> bool {
        let worth = &connection.worth;
        let counted = connection.members.counted_both();
        // A connection whose peer never comes shows its worth as well.
        self.reward_once_paid(kernel, connection, counted);
        // The search for the peer finds out that a socket without a port is no TCP connection.
        let has_credit = || Service::of(kernel, connection).is_none_or(|service| self.spend(service));
        if !worth.is_sought()
            && worth.is_promising(counted, after)
            && (after.is_some() || worth.has_paid() || has_credit())
        {
            worth.set_sought();
        }
        worth.is_sought()
    }

    /// Gives a service credit, once, for a connection that has moved enough in the two directions to pay for a join.
    pub fn reward_once_paid(&self, kernel: &dyn Kernel, connection: &Connection, counted: [u64; 2]) {
        if !connection.worth.has_paid()
            && connection.worth.pays_now(counted)
            && let Some(service) = Service::of(kernel, connection)
        {
            self.earn(service);
        }
    }

    /// Takes credit from the service of a connection that ends before it has paid for the search.
    pub fn write_off(&self, kernel: &dyn Kernel, connection: &Connection) {
        if connection.worth.is_sought()
            && !connection.worth.has_paid()
            && let Some(service) = Service::of(kernel, connection)
        {
            self.lose(service);
        }
    }

    /// Returns the page; makes it if nobody has. Called before a fork, so that both processes share one.
    pub fn page(&self) -> Option<&Common> {
        self.spent.get_or_init(|| Common::new().ok()).as_ref()
    }

    /// Returns whether one more connection of this service may be joined on credit, and spends that credit.
    fn spend(&self, service: Service) -> bool {
        let Some(page) = self.page() else { return true };
        let one_more = |spent| (spent < CREDIT).then_some(spent + 1);
        service.word(page).fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).is_ok()
    }

    /// Takes credit for a connection of this service that was joined on credit, or searched for its peer, and ended
    /// before it had paid.
    fn lose(&self, service: Service) {
        self.change(service, |spent| (spent + SHORT - 1).min(CREDIT));
    }

    /// Gives credit for a connection of this service that has moved as much as pays for a join.
    fn earn(&self, service: Service) {
        self.change(service, |spent| spent.saturating_sub(SHORT));
    }

    /// Changes a service's word. Without a page nothing was ever spent, so there is nothing to lose or to give back.
    fn change(&self, service: Service, to: impl Fn(u64) -> u64) {
        if let Some(Some(page)) = self.spent.get() {
            let _ = service.word(page).fetch_update(Ordering::Relaxed, Ordering::Relaxed, |spent| Some(to(spent)));
        }
    }
}

/// Service that a connection was made to, as far as credit goes: a port, and which side of the connection this endpoint
/// is.
#[derive(Clone, Copy, Debug)]
struct Service {
    port: u16,
    /// Whether this endpoint connected and its peer accepted.
    dialled: bool,
}

impl Service {
    fn of(kernel: &dyn Kernel, connection: &Connection) -> Option<Self> {
        let (fd, dialled) = (connection.descriptors.fd(), connection.dialled);
        connection.identity.service_port(kernel, fd, dialled).map(|port| Self { port, dialled })
    }

    fn word(self, page: &Common) -> &AtomicU64 {
        let words = page.words();
        // Adjacent ports have words of their own.
        &words[(2 * usize::from(self.port) + usize::from(self.dialled)) % words.len()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WEB: Service = Service { port: 80, dialled: false };

    /// Joins connections on credit for as long as there is some, each of which ends as `end` determines. Returns their
    /// number.
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
