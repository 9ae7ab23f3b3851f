// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Programs of this host that know nothing of Tombolo, for domUs.

use std::path::Path;
use tombolo_e2e::error::Result;
use tombolo_e2e::image::Extra;
use tombolo_e2e::programs::Programs;
use tombolo_e2e::vchan;

/// Programs that the case of sockets runs.
const PROGRAMS: [&str; 3] = ["/usr/bin/iperf3", "/usr/bin/redis-server", "/usr/bin/redis-benchmark"];

/// Program that forks while it has a connection.
pub const FORKS: &str = "/bin/forks";

/// Client that never sleeps.
pub const SLEEPLESS: &str = "/bin/sleepless";

/// Returns the first of these programs that this host lacks.
pub fn missing() -> Option<&'static str> {
    PROGRAMS.into_iter().find(|program| !Path::new(program).exists())
}

/// Returns the library that `tombolo run` preloads, Tombolo's own programs, and those of the others that this host has.
///
/// # Errors
/// The library or a program does not build.
pub fn programs() -> Result<Vec<Extra>> {
    let library = Programs::shared("tombolo-preload", "libtombolo_preload.so")?;
    let there = PROGRAMS.into_iter().filter(|program| Path::new(program).exists());
    let named = there.map(|program| (program.trim_start_matches("/usr/").to_owned(), program.into()));
    let mut own = vec![("bin/libtombolo_preload.so".to_owned(), library)];
    for (place, source) in [(FORKS, "src/forks.c"), (SLEEPLESS, "src/bin/xen/sleepless.c")] {
        let name = place.trim_start_matches("/bin/");
        let program = vchan::compile(name, &vchan::here(source), |_| ())?;
        own.push((place.trim_start_matches('/').to_owned(), program));
    }
    Ok(named.chain(own).collect())
}
