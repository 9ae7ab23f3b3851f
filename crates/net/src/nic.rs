// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An interface, whichever engine moves its frames.

use crate::{
    config::{Config, EngineKind},
    counters::{Counters, Figures},
    error::{Error, Result},
    features::Features,
    handle::Handle,
    kernel::Kernel,
    tap::Tap,
};

/// An interface.
#[derive(Debug)]
pub enum Nic {
    /// Its frames pass through this process.
    Tap(Tap),
    /// The kernel's module moves them.
    Kernel(Kernel),
}

impl Nic {
    /// Makes the interface, switched on and without a carrier.
    pub fn open(config: &Config) -> Result<Self> {
        let address = config.place.address();
        let is_vm = address.starts_with("vm:");
        match config.engine {
            EngineKind::Kernel if !is_vm => Err(Error::NotForKernel(address.into())),
            EngineKind::Auto if !is_vm || !Kernel::is_offered() => Tap::open(&config.nic).map(Self::Tap),
            EngineKind::Tap => Tap::open(&config.nic).map(Self::Tap),
            EngineKind::Kernel | EngineKind::Auto => Kernel::open(&config.nic).map(Self::Kernel),
        }
    }

    /// Returns the handle by which the interface is queried and configured.
    pub fn handle(&self) -> &Handle {
        match self {
            Self::Tap(tap) => tap.handle(),
            Self::Kernel(kernel) => kernel.handle(),
        }
    }

    /// Returns the features that the kernel can receive through the interface.
    pub fn takes(&self) -> Features {
        match self {
            Self::Tap(tap) => tap.takes(),
            Self::Kernel(kernel) => kernel.takes(),
        }
    }

    /// Returns the name of the engine.
    pub fn engine(&self) -> &'static str {
        match self {
            Self::Tap(_) => "tap",
            Self::Kernel(_) => "kernel",
        }
    }

    /// Returns the counters: sent and received. `counters` are this process's own.
    pub fn figures(&self, counters: &Counters) -> [Figures; 2] {
        match self {
            Self::Tap(_) => counters.figures(),
            Self::Kernel(kernel) => kernel.figures().unwrap_or_default(),
        }
    }
}
