// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo proxy`: joins each client on one side to a connection of its own on the other.

mod join;
mod place;
mod vchan;

use std::{io, sync::Arc, time::Duration};

use tokio::{net::UnixStream, runtime, sync::Semaphore, task::JoinSet, time};
use tombolo::Options;

use crate::{
    cmd::cat,
    failure::{Failure, Os, Result, print_line},
    signals::Signals,
};
use join::join;
use place::{Listening, Place};

/// Pause after a client could not be accepted, so that an exhausted limit is not hit again at once.
const BREATH: Duration = Duration::from_millis(100);

/// Join a socket on one side to a channel on the other, for many clients at once
///
/// Each client that connects at the one address is joined to a connection of its own to the other. Bytes go both ways;
/// the end of one direction ends only that; a connection that breaks off, breaks off on the other side too.
///
/// An ADDRESS is tcp:HOST:PORT, unix:PATH, or what `tombolo cat` takes: local:NAME or local:/path/to/socket. With a
/// program that runs Xen's libxenvchan it is xen:DOMID/vchan:PATH; a path with the letter n in braces has room for many
/// clients.
///
/// Runs until it is interrupted. Exit codes: 1 if it cannot go on; 2 if the options make no sense or it cannot listen.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Wait for clients at this address; port 0 of tcp takes any that is free
    #[arg(short, long, value_name = "ADDRESS")]
    listen: Place,
    /// Connect to this address for each client
    #[arg(short = 'C', long, value_name = "ADDRESS")]
    connect: Place,
    /// Seconds to wait for whoever is connected to, before the client is turned away
    #[arg(short, long, value_name = "SECONDS", default_value = "5", value_parser = cat::seconds)]
    wait: Duration,
    /// Most clients at once; others wait
    #[arg(long, value_name = "N", default_value = "256", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    clients: u32,
    /// Bytes of the ring this side writes into, 4KiB to 1GiB, rounded up to a power of two
    #[arg(long, value_name = "SIZE", default_value = "256KiB", value_parser = cat::ring)]
    ring: u64,
}

/// Carries out the command, until a signal ends it.
pub fn run(args: &Args) -> Result<()> {
    let signals = Signals::hold()?;
    let runtime = runtime::Builder::new_multi_thread().enable_all().build().os("epoll_create1")?;
    let done = runtime.block_on(serve(args, &signals));
    // A task may still wait for a peer that does not answer.
    runtime.shutdown_background();
    done
}

async fn serve(args: &Args, signals: &Signals) -> Result<()> {
    let options = Options::new().ring_size(args.ring);
    let refused = |source| Failure::Bind { place: args.listen.to_string(), source };
    let mut listening = Listening::begin(&args.listen, &options).await.map_err(refused)?;
    print_line(&format!("tombolo: {} joined to {}", listening.place(), args.connect));
    let options = Arc::new(options.wait_for_listener(args.wait).handshake_timeout(args.wait.max(cat::HANDSHAKE_LEAST)));
    let interrupted = watched(signals)?;
    let seats = Arc::new(Semaphore::new(args.clients as usize));
    let mut clients = JoinSet::new();
    for number in 1u64.. {
        let next = async {
            let seat = Arc::clone(&seats).acquire_owned().await;
            (seat, listening.accept().await)
        };
        let (seat, accepted) = tokio::select! {
            next = next => next,
            _ = interrupted.readable() => break,
        };
        while clients.try_join_next().is_some() {}
        let client = match accepted {
            Ok(client) => client,
            Err(error) => {
                print_line(&format!("tombolo: client {number} is not accepted: {error}"));
                time::sleep(BREATH).await;
                continue;
            }
        };
        let (place, options, wait) = (args.connect.clone(), Arc::clone(&options), args.wait);
        let most = args.clients as usize;
        clients.spawn(async move {
            let _seat = seat;
            let joined = match place.connect(options, wait, most).await {
                Ok(server) => join(client, server).await,
                Err(error) => {
                    client.abort();
                    Err(io::Error::new(error.kind(), format!("cannot connect to {place}: {error}")))
                }
            };
            if let Err(error) = joined {
                print_line(&format!("tombolo: client {number}: {error}"));
            }
        });
    }
    signals.check()
}

/// Returns the signals' descriptor, registered with the runtime.
fn watched(signals: &Signals) -> Result<UnixStream> {
    let wake = std::os::unix::net::UnixStream::from(signals.fd().try_clone_to_owned().os("dup")?);
    wake.set_nonblocking(true).os("fcntl")?;
    Ok(UnixStream::from_std(wake).os("epoll_ctl")?)
}
