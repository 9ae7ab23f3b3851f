// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A volume in writes of 32 KiB, over a channel and over TCP: what the devices were asked, how often processes had to
//! wait, and who used the processors. The devices are counted by QEMU's own trace.

use super::{host_word, say, word};
use crate::site::{At, Site};
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};
use tombolo::{Options, Stream};
use tombolo_e2e::control::Job;
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Error, Result};
use tombolo_e2e::lines::within;
use tombolo_e2e::qemu::Vm;

/// Bytes of a write.
const WRITE: usize = 32 << 10;
/// What is counted: stores to the doorbell; notifications of a virtio device, both ways.
const EVENTS: [&str; 3] = ["memory_region_ops_write", "virtio_queue_notify", "virtio_notify"];
