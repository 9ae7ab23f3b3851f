// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs the test suites of Redis and PostgreSQL, from Debian's sources and against the installed servers, with the
//! library and without it: each test gives the same result. The short form runs a part of them. The sources are fetched
//! once.

mod place;

use std::{
    env, fs,
    io::Write,
    os::unix::fs::{PermissionsExt, chown, symlink},
    path::{Path, PathBuf},
    process::Command,
};

use place::{
    Namespaces, Place, Started, find, has, output,
    suite::{self, Results, Use, is_long},
};

/// A user without rights: PostgreSQL refuses to run as root.
const NOBODY: u32 = 65534;

/// Units of Redis' tests that take seconds. They check on one connection the effects of another.
const SHORT: [&str; 4] = ["unit/pubsub", "unit/multi", "unit/client-eviction", "unit/type/incr"];

/// Units that are left out: they test the machine (its rights, its memory, certificates), not connections.
const LEFT_OUT: [&str; 4] = ["unit/printver", "unit/tls", "unit/oom-score-adj", "unit/violations"];

/// Returns a package's sources, fetched once and kept. Returns `None`, and reports a skip, where they cannot be
/// fetched.
fn source(test: &str, package: &str) -> Option<PathBuf> {
    let home = || env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    let cache = env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(home).unwrap_or_else(env::temp_dir);
    let cache = cache.join("tombolo/sources");
    let kept = cache.join(package);
    if kept.is_dir() {
        return Some(kept);
    }
    fs::create_dir_all(&cache).unwrap();
    let folder = tempfile::tempdir_in(&cache).unwrap();
    let fetch = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../tools/debian-source.sh"));
    let fetched = Command::new(fetch).arg(package).arg(folder.path()).output().unwrap();
    // Another run may have fetched them first.
    if fetched.status.success() && (fs::rename(folder.path().join(package), &kept).is_ok() || kept.is_dir()) {
        return Some(kept);
    }
    let why = String::from_utf8_lossy(&fetched.stderr).trim().replace('\n', "; ");
    let _ = writeln!(std::io::stderr(), "SKIP {test} (needs Debian's sources): {why}");
    None
}

/// Returns the tests whose results differ, with both results.
fn differing<'a>(plain: &'a Results, with: &'a Results) -> impl Iterator<Item = String> + use<'a> {
    let of = |results: &Results, test: &str| results.get(test).cloned().unwrap_or_else(|| "not run".to_owned());
    let tests = plain.keys().chain(with.keys().filter(|test| !plain.contains_key(*test)));
    tests
        .map(move |test| (test, of(plain, test), of(with, test)))
        .filter(|(_, plain, with)| plain != with)
        .map(|(test, plain, with)| format!("{test}: {plain} without, {with} with the library"))
}

// ---- Redis

/// Redis' tests, in a place that they can write to.
struct Redis {
    place: Place,
    folder: PathBuf,
    namespaces: Namespaces,
}

impl Redis {
    fn new(test: &str) -> Option<Self> {
        let programs = ["redis-server", "redis-cli", "redis-benchmark", "redis-check-aof", "redis-check-rdb"];
        if !has(test, &["tclsh", "apt-get", "dpkg-source", "ip"]) || !has(test, &programs) {
            return None;
        }
        let source = source(test, "redis")?;
        let namespaces = Namespaces::new(test)?;
        let place = Place::new();
        let folder = place.path("redis");
        fs::create_dir_all(folder.join("src")).unwrap();
        for part in ["tests", "redis.conf", "runtest", "utils"] {
            output(Command::new("cp").arg("-a").arg(source.join(part)).arg(&folder), &place.path("copied"));
        }
        for program in programs {
            symlink(find(program).unwrap(), folder.join("src").join(program)).unwrap();
        }
        symlink(find("redis-server").unwrap(), folder.join("src/redis-sentinel")).unwrap();
        Some(Self { place, folder, namespaces })
    }

    /// Returns the names of the units.
    fn units(&self) -> Vec<String> {
        let said =
            output(Command::new("./runtest").arg("--list-tests").current_dir(&self.folder), &self.place.path("units"));
        let is_unit = |line: &&str| line.starts_with("unit/") && !LEFT_OUT.contains(line);
        said.lines().filter(is_unit).map(str::to_owned).collect()
    }

    fn run(&self, unit: &str, dress: bool) -> Results {
        let mut command = self.namespaces.bare(0, "./runtest");
        command.args(["--clients", "1", "--single", unit]).current_dir(&self.folder);
        if dress {
            self.place.dress(command.env("TOMBOLO_SOCKETS_AFTER", "0"));
        }
        of_redis(&suite::run(&mut command, &self.place.path("said")))
    }

    /// Asserts that a unit gives the same results with the library. Some of its tests expect that a server has already
    /// handled a request that they sent over another connection, which a busy machine does not always grant, even
    /// without the library. A test that differs in the first run therefore fails only if it differs in the same way in
    /// two further runs. Tests that differ only in those runs are shown and do not fail.
    fn assert_same(&self, unit: &str) {
        let mut differ = Vec::new();
        for _ in 0..3 {
            let (plain, with) = (self.run(unit, false), self.run(unit, true));
            assert!(plain.values().any(|result| result == "ok"), "{unit}: {plain:?}");
            let now: Vec<_> = differing(&plain, &with).collect();
            _ = writeln!(std::io::stderr(), "{unit}: {} tests, {} differ {now:?}", plain.len(), now.len());
            differ =
                if differ.is_empty() { now } else { now.into_iter().filter(|test| differ.contains(test)).collect() };
            if differ.is_empty() {
                return;
            }
        }
        panic!("{unit} differs with the library:\n{differ:#?}\n{}", self.place.log());
    }
}

/// Parses lines such as `[ok]: SADD and SREM (3 ms)` and `[err]: why in FILE`; the same name may occur more than once.
fn of_redis(said: &str) -> Results {
    let mut results = Results::new();
    for line in said.lines() {
        let line: String = line.split('\u{1b}').enumerate().map(|(at, part)| without_colour(at, part)).collect();
        let line = line.trim_start_matches("*** ");
        let Some((result, test)) = line.strip_prefix('[').and_then(|line| line.split_once("]: ")) else { continue };
        if !matches!(result, "ok" | "err" | "exception" | "skip" | "ignore") {
            continue;
        }
        let (test, _) = test.rsplit_once(if result == "err" { " in " } else { " (" }).unwrap_or((test, ""));
        let mut name = test.to_owned();
        while results.contains_key(&name) {
            name.push('+');
        }
        results.insert(name, result.to_owned());
    }
    results
}

/// Returns the text between two changes of colour.
fn without_colour(at: usize, part: &str) -> &str {
    if at == 0 { part } else { part.split_once('m').map_or(part, |(_, text)| text) }
}

#[test]
fn redis_own_tests_are_the_same() {
    let Some(redis) = Redis::new("redis_own_tests_are_the_same") else { return };
    let units = if is_long() { redis.units() } else { SHORT.map(str::to_owned).into() };
    assert!(units.len() >= SHORT.len(), "{units:?}");
    units.iter().for_each(|unit| redis.assert_same(unit));
    let used = Use::of(&redis.place);
    _ = writeln!(std::io::stderr(), "redis: {used:?}");
    assert!(used.is_at_least(Use { ends: 20, percent: 20 }), "{used:?}");
}

// ---- PostgreSQL

/// The beginning of PostgreSQL's schedule, and a few tests that move much data.
const SCHEDULE: &str = "test: test_setup\n\
    test: boolean char name varchar text int2 int4 int8 oid float4 float8 bit numeric txid uuid enum money\n\
    test: strings numerology point lseg line box path polygon circle date time timetz timestamp timestamptz interval\n\
    test: copy copyselect copydml insert insert_conflict\n\
    test: create_index\n\
    test: portals arrays subselect union case join transactions\n";

fn as_nobody(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(program).current_dir("/");
    command
}

/// Runs a server and the driver of its tests, with the library or without.
fn run_postgres(source: &Path, namespaces: &Namespaces, place: &Place, dress: bool) -> Results {
    let folder = place.path(if dress { "pg-with" } else { "pg-plain" });
    fs::create_dir_all(folder.join("out")).unwrap();
    let regress = source.join("src/test/regress");
    let headers = output(Command::new("pg_config").arg("--includedir-server"), &place.path("headers"));
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-O1", "-w", "-I", headers.trim(), "-o"]).arg(folder.join("regress.so"));
    output(cc.arg(regress.join("regress.c")), &place.path("made"));
    // Copies into a place where a user without rights sees them.
    output(Command::new("cp").arg("-a").arg(&regress).arg(folder.join("in")), &place.path("copied"));
    fs::write(folder.join("short"), SCHEDULE).unwrap();
    output(Command::new("chown").args(["-R", "65534:65534"]).arg(place.path("")), &place.path("given"));
    fs::set_permissions(place.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    for name in ["meet", "reports"] {
        chown(place.path(name), Some(NOBODY), Some(NOBODY)).unwrap();
    }
    let base = folder.join("base");
    let programs = find("initdb").unwrap();
    let programs = programs.parent().unwrap();
    let mut make = as_nobody(&programs.join("initdb"));
    make.args(["-U", "keeper", "-A", "trust", "-N", "--no-locale", "-E", "UTF8", "-D"]).arg(&base);
    output(&mut make, &place.path("initdb"));
    let within = |mut inner: Command| {
        let mut command = namespaces.bare(0, "env");
        command.arg(inner.get_program()).args(inner.get_args()).current_dir("/");
        if dress {
            place.dress(&mut inner);
            command.envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?))));
            command.env("TOMBOLO_SOCKETS_AFTER", "0");
        }
        command
    };
    let mut server = as_nobody(&programs.join("postgres"));
    // An automatic vacuum at an arbitrary time changes plans, and the order of rows that the tests print.
    server
        .args(["-h", "127.0.0.1", "-p", "5432", "-F", "-c", "autovacuum=off", "-k"])
        .arg(&folder)
        .arg("-D")
        .arg(&base);
    let log = fs::File::create(folder.join("server")).unwrap();
    let mut server = Started::new(within(server).stderr(log.try_clone().unwrap()).stdout(log));
    namespaces.wait_for(5432);
    let mut tests = as_nobody(&programs.join("../lib/pgxs/src/test/regress/pg_regress"));
    tests.args(["--host=127.0.0.1", "--port=5432", "--user=keeper", "--max-connections=8"]);
    let schedule = if is_long() { folder.join("in/parallel_schedule") } else { folder.join("short") };
    for (option, path) in [
        ("bindir", programs.to_path_buf()),
        ("dlpath", folder.clone()),
        ("inputdir", folder.join("in")),
        ("outputdir", folder.join("out")),
        ("schedule", schedule),
    ] {
        tests.arg(format!("--{option}={}", path.display()));
    }
    let said = suite::run(&mut within(tests), &folder.join("said"));
    server.terminate();
    of_postgres(&said)
}

/// Parses lines such as `test boolean  ... ok  12 ms` and `  char  ... FAILED  3 ms`.
fn of_postgres(said: &str) -> Results {
    let one = |line: &str| {
        let (test, result) = line.split_once(" ... ")?;
        let test = test.trim().trim_start_matches("test ").trim();
        let result = result.split_whitespace().next()?;
        matches!(result, "ok" | "FAILED" | "failed").then(|| (test.to_owned(), result.to_owned()))
    };
    said.lines().filter_map(one).collect()
}

#[test]
fn postgresqls_own_tests_are_the_same() {
    let test = "postgresqls_own_tests_are_the_same";
    let needs = ["initdb", "psql", "pg_config", "setpriv", "cc", "apt-get", "dpkg-source", "ip"];
    if !has(test, &needs) {
        return;
    }
    let headers = Command::new("pg_config").arg("--includedir-server").output().unwrap().stdout;
    if !Path::new(String::from_utf8_lossy(&headers).trim()).join("postgres.h").is_file() {
        let _ = writeln!(std::io::stderr(), "SKIP {test} (needs postgresql-server-dev-15): it is not installed");
        return;
    }
    let Some(source) = source(test, "postgresql-15") else { return };
    let Some(namespaces) = Namespaces::new(test) else { return };
    let wanted = Use { ends: 20, percent: 50 };
    suite::same("postgresql", wanted, |place, dress| run_postgres(&source, &namespaces, place, dress));
}

#[test]
fn canary_result_that_differs_is_seen() {
    let redis = |second: &str| of_redis(&format!("Testing unit/multi\n[ok]: MUTLI / EXEC basics (1 ms)\n{second}\n"));
    let same = redis("\u{1b}[0;32;49m[ok]\u{1b}[0m: DISCARD (3 ms)");
    assert_eq!(same.len(), 2);
    assert_eq!(redis("*** [err]: DISCARD in a.tcl").get("DISCARD").map(String::as_str), Some("err"));
    assert_eq!(differing(&same, &redis("[ok]: DISCARD (140 ms)")).count(), 0);
    for other in ["[err]: DISCARD in tests/unit/multi.tcl", "*** [\u{1b}[0;31merr\u{1b}[0m]: DISCARD in a.tcl", ""] {
        assert!(differing(&same, &redis(other)).count() > 0, "{other}");
        assert!(differing(&redis(other), &same).count() > 0, "{other}");
    }
    let postgres = |second: &str| of_postgres(&format!("test test_setup      ... ok     293 ms\n{second}\n"));
    let same = postgres("     boolean       ... ok       12 ms");
    assert_eq!(same.len(), 2);
    for other in ["     boolean       ... FAILED       12 ms", "     boolean   ... failed (ignored)   1 ms", ""] {
        assert!(differing(&same, &postgres(other)).count() > 0, "{other}");
    }
}
