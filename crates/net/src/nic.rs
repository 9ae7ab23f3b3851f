// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An interface, whoever moves its frames.

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
    /// Its frames go through this process.
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

    /// How it is asked and changed.
    pub fn handle(&self) -> &Handle {
        match self {
            Self::Tap(tap) => tap.handle(),
            Self::Kernel(kernel) => kernel.handle(),
        }
    }

    /// What the kernel can receive from it.
    pub fn takes(&self) -> Features {
        match self {
            Self::Tap(tap) => tap.takes(),
            Self::Kernel(kernel) => kernel.takes(),
        }
    }

    /// Who moves its frames, in a word.
    pub fn engine(&self) -> &'static str {
        match self {
            Self::Tap(_) => "tap",
            Self::Kernel(_) => "kernel",
        }
    }

    /// What was counted: sent and received. `counters` are this process's own.
    pub fn figures(&self, counters: &Counters) -> [Figures; 2] {
        match self {
            Self::Tap(_) => counters.figures(),
            Self::Kernel(kernel) => kernel.figures().unwrap_or_default(),
        }
    }
}
