// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The conformance suite of backends, with the shipping brokers between the two endpoints.

mod common;

use std::sync::Arc;

use common::endpoint::World;
use tombolo_control::Life;
use tombolo_domain::{Endpoint, Rendezvous};
use tombolo_testing::conformance::{Actor, Fixture, Mortal};

tombolo_testing::conformance!(Two(Arc::new(World::new())));

#[test]
fn child_process() {
    common::endpoint::play();
}

struct Two(Arc<World>);

impl Fixture for Two {
    fn listening(&self) -> &dyn Rendezvous {
        &self.0.a.domain
    }

    fn connecting(&self) -> &dyn Rendezvous {
        &self.0.b.domain
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

/// A peer whose whole machine can be paused, and that can be killed alone.
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
        self.world.live(Life::Paused);
    }

    fn resume(&mut self) {
        self.actor.go_on();
        self.world.live(Life::Running);
    }

    fn kill(&mut self) {
        self.actor.kill();
    }
}
