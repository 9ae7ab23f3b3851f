// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer 4. Uses: os, channel, tombolo.
//!
//! The rig for tests that need virtual machines. It fetches a kernel from Debian's archive ([`debian`]), builds
//! Tombolo's module for it ([`module`]) and Tombolo's programs ([`programs`]), and packs them with its own binary into
//! an initramfs ([`image`]). It boots that under QEMU ([`qemu`]) and runs commands in the guest over a serial line
//! ([`control`]). The binary is host and guest at once: as process 1 of a guest it is the [`agent`]. The rig joins
//! guests by memory and doorbells of its own ([`ivshmem`]) where only the module is tested, or else by the host's
//! [`broker`].
//!
//! A hypervisor other than QEMU needs only another way to make a [`control::Control`] and a [`console::Console`].

#![deny(unsafe_code)]

pub mod agent;
pub mod broker;
pub mod console;
pub mod control;
pub mod debian;
pub mod error;
pub mod guest;
pub mod image;
pub mod ivshmem;
pub mod line_reader;
pub mod module;
pub mod modules;
pub mod network;
pub mod process;
pub mod programs;
pub mod qemu;
pub mod qmp;
pub mod runner;
pub mod scratch;
pub mod stream;
pub mod up;
pub mod vchan;
pub mod wire;
pub mod xen;
