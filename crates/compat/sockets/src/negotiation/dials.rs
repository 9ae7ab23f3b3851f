// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Links to other processes that are being made. No call of the program waits for any; a later one asks again (S-4).

use std::time::{Duration, Instant};

use tombolo_domain::{Connecting, Endpoint, Error, Rendezvous};

/// How long a link may take to be made, and how many at once.
const PATIENCE: Duration = Duration::from_secs(5);
const DIALS: usize = 64;

/// Links that are being made.
#[derive(Debug, Default)]
pub(super) struct Dials(Vec<Dial>);

#[derive(Debug)]
struct Dial {
    service: String,
    began: Instant,
    connecting: Box<dyn Connecting>,
}

impl Dials {
    /// The link to a service, once it is there; begins to make it if nobody did.
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
