// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Verbs of the command.

pub mod cat;
pub mod demo;
pub mod doctor;
pub mod generate;
pub mod hook;
pub mod link;
pub mod ls;
pub mod net;
pub mod proxy;
pub mod run;
pub mod top;
pub mod vm;
