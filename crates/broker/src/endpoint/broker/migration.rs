// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Handles the migration of this machine: the device shared with the host goes while it runs, and another one comes
//! (B-27).

use std::io;

use super::{Broker, Devices, Host, Pages, TURN, random};

/// Reason given to programs while the device is missing.
pub(super) const HOSTLESS: &str =
    "this machine's doorbell device was taken away, as before a migration: it has no links until there is another one";

impl<D: Devices> Broker<D> {
    /// Receives from the host, or looks for a new device. Returns whether there may be more.
    pub(super) fn serve_host(&mut self) -> io::Result<bool> {
        if self.is_hostless {
            let renewed = self.devices.renew();
            return renewed.map_or(Ok(false), |renewed| begin_anew(self, renewed));
        }
        let mut news = Vec::new();
        let turned = self.host.turn(self.devices.host(), TURN, &mut news);
        news.into_iter().for_each(|news| self.learn(news));
        match turned {
            Ok((ring, busy)) => {
                if ring {
                    self.devices.host().notify();
                }
                Ok(busy)
            }
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => match self.devices.renew() {
                None => Err(error),
                Some(renewed) => {
                    tracing::warn!("{HOSTLESS}");
                    self.is_hostless = true;
                    self.forget_links();
                    begin_anew(self, renewed)
                }
            },
            Err(error) => Err(error),
        }
    }

    /// Forgets everything that the host sent. Programs are told that their links are taken away; listening programs go
    /// on.
    pub(super) fn forget_links(&mut self) {
        (self.name, self.nets, self.usage_later) = (None, None, false);
        self.numbers.clear();
        self.finding.forget_links();
        for (_, mut link) in std::mem::take(&mut self.links) {
            link.leave(&mut self.programs);
            self.old.push(link);
        }
        self.old.iter_mut().for_each(|link| link.is_orphan = true);
    }
}

/// Starts a new session with the host if another device has been found, and goes on waiting if there is none yet.
fn begin_anew<D: Devices>(broker: &mut Broker<D>, renewed: io::Result<()>) -> io::Result<bool> {
    match renewed {
        Ok(()) => {
            broker.host = Host::begin(random()?, broker.settings.boot, broker.devices.host())?;
            broker.devices.host().notify();
            broker.is_hostless = false;
            tracing::info!("this machine has a doorbell device again");
            Ok(true)
        }
        Err(error) => match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied | io::ErrorKind::ResourceBusy => Ok(false),
            _ => Err(error),
        },
    }
}
