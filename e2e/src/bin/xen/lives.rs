// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Prints what one endpoint of a channel learns of the other's liveness.

use std::thread;
use std::time::Duration;
use tombolo::{Options, Stream};
use tombolo_e2e::error::{Context, Result};

const WAIT: Duration = Duration::from_secs(60);
/// Interval between two checks.
const EVERY: Duration = Duration::from_millis(20);

/// Connects and prints each change of liveness, until the other endpoint is gone.
pub fn print_liveness(address: &str) -> Result<()> {
    let options = Options::new().wait_for_listener(WAIT).handshake_timeout(WAIT);
    let stream: Stream = tombolo::connect_with(address, &options).context(address)?;
    let mut last = None;
    loop {
        let life = stream.liveness();
        if last != Some(life) {
            println!("{life:?}");
            last = Some(life);
        }
        if life.is_gone() {
            return Ok(());
        }
        thread::park_timeout(EVERY);
    }
}
