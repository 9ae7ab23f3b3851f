// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The conformance suite of backends, with the shipping brokers between the two endpoints.

mod common;

use std::sync::Arc;

use common::endpoint::World;
use tombolo_control::Life;
use tombolo_domain::Rendezvous;
use tombolo_testing::conformance::{Fixture, Mortal};

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
        let ((actor, link), world) = (self.0.mortal(), self.0.clone());
        let life = |is_paused| if is_paused { Life::Paused } else { Life::Running };
        Some(actor.into_mortal(link, move |is_paused| world.live(life(is_paused))))
    }
}
