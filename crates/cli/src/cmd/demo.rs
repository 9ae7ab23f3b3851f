// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo demo`.

/// x
#[derive(Debug, clap::Args)]
pub struct Args {}
pub fn run(_: &Args) -> crate::failure::Result<()> {
    Ok(())
}
