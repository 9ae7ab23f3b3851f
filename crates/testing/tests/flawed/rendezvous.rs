// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Flaws of the rendezvous.

use std::os::fd::BorrowedFd;

use tombolo_domain::{Deadline, Endpoint, Error, Listener, Rendezvous, Result, wait_readable};
use tombolo_testing::harsh::HarshDomain;

use super::{Flaw, Shared, link::FlawedLink};

#[derive(Clone, Debug)]
pub struct FlawedDomain {
    inner: HarshDomain,
    shared: Shared,
}

impl FlawedDomain {
    pub fn new(inner: HarshDomain, shared: &Shared) -> Self {
        Self { inner, shared: shared.clone() }
    }
}

impl Rendezvous for FlawedDomain {
    fn scheme(&self) -> &'static str {
        "flawed"
    }

    fn listen(&self, service: &str) -> Result<Box<dyn Listener>> {
        let inner = match self.inner.listen(service) {
            Err(_) if self.shared.flaw == Flaw::RenamesServices => self.inner.listen("a/renamed")?,
            listened => listened?,
        };
        Ok(Box::new(FlawedListener { inner: Some(inner), shared: self.shared.clone(), stash: Vec::new() }))
    }

    fn connect(&self, service: &str, deadline: Deadline) -> Result<Box<dyn Endpoint>> {
        match self.inner.connect(service, deadline) {
            Err(Error::NotFound(_)) if self.shared.flaw == Flaw::ConnectTimesOut => Err(Error::TimedOut),
            connected => connected.map(|link| Box::new(FlawedLink::new(link, &self.shared)) as Box<dyn Endpoint>),
        }
    }
}

#[derive(Debug)]
struct FlawedListener {
    inner: Option<Box<dyn Listener>>,
    shared: Shared,
    stash: Vec<Box<dyn Endpoint>>,
}

impl Listener for FlawedListener {
    fn accept(&mut self) -> Result<Option<Box<dyn Endpoint>>> {
        let inner = self.inner.as_mut().expect("it is there until it is dropped");
        let accepted = match self.shared.flaw {
            Flaw::AcceptBlocks => {
                wait_readable(inner.fd(), Deadline::NEVER)?;
                let accepted = inner.accept()?;
                accepted.as_ref().map(|link| wait_readable(link.fd(), Deadline::NEVER)).transpose()?;
                accepted
            }
            Flaw::AcceptsNewest => {
                while let Some(link) = inner.accept()? {
                    self.stash.push(link);
                }
                self.stash.pop()
            }
            _ => inner.accept()?,
        };
        Ok(accepted.map(|link| Box::new(FlawedLink::new(link, &self.shared)) as Box<dyn Endpoint>))
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.inner.as_ref().expect("it is there until it is dropped").fd()
    }
}

impl Drop for FlawedListener {
    fn drop(&mut self) {
        if self.shared.flaw == Flaw::LeavesListener {
            std::mem::forget(self.inner.take());
        }
    }
}
