// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Forbids `io_uring`, which reads and writes sockets where no library sees it. A program that finds it missing uses
//! the usual calls.

use std::collections::BTreeMap;

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

use crate::failure::{Failure, Result};

/// `ENOSYS`, and `io_uring_setup`, which has one number on all architectures.
const ENOSYS: u32 = 38;
const IO_URING_SETUP: i64 = 425;

/// Makes `io_uring_setup` fail with `ENOSYS` for this process and all its descendants.
pub fn forbid() -> Result<()> {
    let failed = |why: &dyn std::fmt::Display| {
        Failure::Outcome(format!("cannot keep the program from io_uring: {why}; --allow-io-uring runs it all the same"))
    };
    let arch = std::env::consts::ARCH.try_into().map_err(|error: seccompiler::BackendError| failed(&error))?;
    let rules = BTreeMap::from([(IO_URING_SETUP, Vec::new())]);
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, SeccompAction::Errno(ENOSYS), arch);
    let program: BpfProgram = filter.and_then(TryInto::try_into).map_err(|error| failed(&error))?;
    seccompiler::apply_filter(&program).map_err(|error| failed(&error))
}
