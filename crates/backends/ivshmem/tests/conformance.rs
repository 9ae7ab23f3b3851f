// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The conformance suite on this backend, with peers in separate processes that are stopped and killed.

mod support;

use std::sync::Arc;

use support::World;
use tombolo_control::Life;
use tombolo_domain::{Endpoint, Rendezvous};
use tombolo_testing::conformance::{Actor, Fixture, Mortal};

tombolo_testing::conformance!(Two(Arc::new(World::new())));

#[test]
fn child_process() {
    support::play();
}

struct Two(Arc<World>);

impl Fixture for Two {
    fn listening(&self) -> &dyn Rendezvous {
        &self.0.a
    }

    fn connecting(&self) -> &dyn Rendezvous {
        &self.0.b
    }

    fn service(&self) -> String {
        self.0.service()
    }

    fn stale_service(&self) -> Option<String> {
        Some(self.0.stale())
    }

    fn mortal(&self) -> Option<Box<dyn Mortal>> {
        let (actor, link) = self.0.mortal();
        Some(Box::new(Peer { world: self.0.clone(), actor, link }))
    }
}

/// A peer whose whole domain can be paused, and that can be killed alone.
struct Peer {
    world: Arc<World>,
    actor: Actor,
    link: Box<dyn Endpoint>,
}

impl Mortal for Peer {
    fn link(&mut self) -> &mut dyn Endpoint {
        &mut *self.link
    }

    fn pause(&mut self) {
        self.actor.stop();
        self.world.live("b", Life::Paused);
    }

    fn resume(&mut self) {
        self.actor.go_on();
        self.world.live("b", Life::Running);
    }

    fn kill(&mut self) {
        self.actor.kill();
    }
}
