// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sessions with other processes that are being opened. No call of the program waits for any; a later one asks again
//! (S-4).

use std::time::{Duration, Instant};

use tombolo_domain::{Connecting, Endpoint, Error, Rendezvous};

/// Time that opening a session may take, and largest number opened at once.
const PATIENCE: Duration = Duration::from_secs(5);
const DIALS: usize = 64;

/// Sessions that are being opened.
#[derive(Debug, Default)]
pub(super) struct Dials(Vec<Dial>);

#[derive(Debug)]
struct Dial {
    service: String,
    began: Instant,
    connecting: Box<dyn Connecting>,
}

impl Dials {
    /// Returns the endpoint of a session with a service, once it is open; begins to open it if nobody has.
    ///
    /// # Errors
    /// As [`Rendezvous::begin_connect`].
    pub(super) fn try_dial(
        &mut self,
        rendezvous: &dyn Rendezvous,
        service: &str,
    ) -> Result<Option<Box<dyn Endpoint>>, Error> {
        let now = Instant::now();
        self.0.retain(|dial| now.duration_since(dial.began) < PATIENCE);
        let at = self.0.iter().position(|dial| dial.service == service);
        let mut dial = match at {
            Some(at) => self.0.swap_remove(at),
            None if self.0.len() >= DIALS => return Ok(None),
            None => {
                let connecting = rendezvous.begin_connect(service)?;
                Dial { service: service.to_owned(), began: now, connecting }
            }
        };
        let link = dial.connecting.finish_connect()?;
        if link.is_none() {
            self.0.push(dial);
        }
        Ok(link)
    }
}
