//! One soak from its start to its report.

use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::case::Case;
use crate::daemon::Daemon;
use crate::fault_proxy::FaultProxy;
use crate::image_server::ImageServer;
use crate::providers_file::EntryFile;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::audit;
use super::breaker::{break_daemon, break_host, break_image, mend_all};
use super::caller::Caller;
use super::course::{Course, Served, entry};
use super::journal::{Journal, Replay};
use super::plan::{Act, Actor, DAEMONS, HOSTS, IMAGES, NAMES, Patience, Plan, Selector, Step, Uid};
use super::reasons::{AFTERMATH, is_plausible};
use super::report::{Finding, Report};
use super::weather::Weather;

/// Longest that the steps under way may take once no new one is begun.
const LAST_STEPS: Duration = Duration::from_secs(300);
/// Longest until every key can be deleted on hosts that work again.
const DELETED_WITHIN: Duration = Duration::from_secs(180);

#[derive(Debug, Clone)]
pub struct Options {
    pub seed: u64,
    /// How long new steps are begun; the end takes a minute more.
    pub length: Duration,
    /// A journal whose steps are begun in the same order instead of the seed's.
    pub replay: Option<PathBuf>,
    /// Where the journal is written; the daemons' logs are put beside it when anything was found.
    pub journal: PathBuf,
}

/// An actor with what it needs, given back at its end.
enum Player {
    Caller(Caller),
    Host(usize),
    Images,
    Daemons(Vec<Daemon>, EntryFile),
}

/// None, and a line that says why, where there is no lab.
pub async fn run(options: &Options) -> Result<Option<Report>, String> {
    let replay = options.replay.as_deref().map(Replay::read).transpose()?;
    let seed = replay.as_ref().map_or(options.seed, |replay| replay.seed);
    let Some(case) = Case::start("soak", &HOSTS) else { return Ok(None) };
    let case = Arc::new(case);
    let (course, daemons, entry) = set_up(case.clone(), options, replay, seed).await;
    let course = Arc::new(course);
    let foreign = audit::foreign(&course).await?;
    warm_up(&course).await?;
    let steady = daemons[0].pid();
    let before = audit::figures(&course, steady).await?;

    let players = tokio::select! {
        players = play(&course, daemons, entry, options.length) => players,
        never = tell(&course, options.length) => match never {},
    };
    eprintln!("soak: mending, deleting, and looking at what is left");
    let daemons = the_end(&course, players).await;

    for left in audit::left(&course).await {
        course.report().leaks.push(Finding::at_the_end(left));
    }
    if audit::foreign(&course).await? != foreign {
        course.report().violations.push(Finding::at_the_end("what is foreign has changed"));
    }
    let (after, grown) = audit::back_to(&course, steady, &before).await;
    course.report().leaks.extend(grown.into_iter().map(Finding::at_the_end));
    course.report().figures = before.iter().zip(&after).map(|(b, a)| (b.what.clone(), b.value, a.value)).collect();
    judge(&course);
    let mut report = std::mem::take(&mut *course.report());
    report.faults = course.weather.counts();
    report.journal = course.journal.path().to_owned();
    if !report.is_good() {
        keep_logs(&course, &mut report);
    }
    // before the case, which cleans up what they made
    drop(daemons);
    Ok(Some(report))
}

async fn set_up(case: Arc<Case>, options: &Options, replay: Option<Replay>, seed: u64) -> (Course, Vec<Daemon>, EntryFile) {
    let mut proxies = Vec::new();
    for host in HOSTS {
        let host = case.host(host);
        proxies.push(FaultProxy::to(format!("{}:{}", host.address, host.port)).await);
        audit::plant_foreign(host, &case.vm("foreign"));
    }
    let images = ImageServer::start().await;
    let served = Served::of(&case, &images, 0);
    let entry = served.in_entry(entry(&case, &proxies), &images);
    let mut daemons = Vec::new();
    for n in 0..DAEMONS {
        daemons.push(case.daemon_in(&format!("d{n}"), entry.clone()).await);
    }
    let course = Course {
        weather: Weather::default(),
        journal: Journal::create(&options.journal, seed),
        replay,
        report: Mutex::new(Report { seed, ..Report::default() }),
        proxies,
        images,
        served: Mutex::new(served),
        sockets: daemons.iter().map(Daemon::socket).collect(),
        logs: daemons.iter().map(Daemon::log_path).collect(),
        endings: std::array::from_fn(|_| AtomicU64::new(0)),
        over: watch::Sender::new(false),
        case,
    };
    (course, daemons, entry)
}

/// Fills what is filled once, so that the figures of the start can be those of the end.
async fn warm_up(course: &Arc<Course>) -> Result<(), String> {
    let (vm, spec) = (course.case.vm("warm"), super::plan::Spec::One);
    for socket in &course.sockets {
        let clients = crate::clients::Clients::on(socket);
        for host in 0..HOSTS.len() {
            let request = course.request(&vm, host, super::plan::Vm { uid: Uid::A, spec }, IMAGES[0]);
            let uid = request.uid.clone();
            clients.create(request).await.map_err(|e| format!("Create on a sound host: {}", e.message()))?;
            clients.delete_by_key(&vm, &uid).await.map_err(|e| format!("Delete on a sound host: {}", e.message()))?;
        }
        clients.check().await.map_err(|e| format!("Check: {}", e.message()))?;
    }
    Ok(())
}

/// Says every minute how far it is.
async fn tell(course: &Course, length: Duration) -> Infallible {
    let minutes = length.as_secs() / 60;
    let of = if course.replay.is_some() { "of a replay".to_owned() } else { format!("of {minutes}") };
    for minute in 1_u64.. {
        tokio::time::sleep(Duration::from_secs(60)).await;
        let faults: usize = course.weather.counts().values().sum();
        let report = course.report();
        let calls: usize = report.calls.values().sum();
        let (wrong, stuck) = (report.violations.len(), report.stuck.len());
        drop(report);
        eprintln!("soak: minute {minute} {of}, {calls} calls, {faults} faults, {wrong} violations, {stuck} stuck");
    }
    std::future::pending().await
}

/// Everybody acts until the time is up, or the replay is through.
async fn play(course: &Arc<Course>, daemons: Vec<Daemon>, entry: EntryFile, length: Duration) -> Vec<Player> {
    let mut playing = JoinSet::new();
    let mut rest = Some((daemons, entry));
    for actor in Actor::all() {
        let player = match actor {
            Actor::Caller(n) => Player::Caller(Caller::new(course.clone(), n)),
            Actor::Host(n) => Player::Host(n),
            Actor::Images => Player::Images,
            Actor::Daemons => {
                let (daemons, entry) = rest.take().expect("there is one such actor");
                Player::Daemons(daemons, entry)
            }
        };
        playing.spawn(act_out(course.clone(), actor, player));
    }
    let started = Instant::now();
    let mut players = Vec::new();
    let replayed = course.replay.is_some();
    loop {
        let left = if replayed { Duration::MAX } else { length.saturating_sub(started.elapsed()) };
        let limit = if *course.over.borrow() { LAST_STEPS } else { left };
        match tokio::time::timeout(limit, playing.join_next()).await {
            Ok(None) => return players,
            Ok(Some(Ok(player))) => players.push(player),
            Ok(Some(Err(e))) => course.report().failures.push(Finding::at_the_end(format!("an actor ended: {e}"))),
            Err(_) if *course.over.borrow() => {
                course.report().stuck.push(Finding::at_the_end(format!("steps are not over {LAST_STEPS:?} after the last was begun")));
                playing.abort_all();
            }
            Err(_) => drop(course.over.send_replace(true)),
        }
    }
}

async fn act_out(course: Arc<Course>, actor: Actor, mut player: Player) -> Player {
    match &course.replay {
        Some(replay) => {
            for (turn, step) in replay.steps_of(actor) {
                replay.wait_for(turn).await;
                take(&course, actor, &mut player, &step, Some(turn)).await;
            }
        }
        None => {
            for step in Plan::of(course.report_seed(), actor) {
                let _ = tokio::time::timeout(Duration::from_millis(step.rest_ms), course.until_over()).await;
                if *course.over.borrow() {
                    break;
                }
                take(&course, actor, &mut player, &step, None).await;
            }
        }
    }
    player
}

async fn take(course: &Arc<Course>, actor: Actor, player: &mut Player, step: &Step, turn: Option<u64>) {
    let number = course.journal.began(course.weather.now(), actor, step);
    if let (Some(replay), Some(turn)) = (&course.replay, turn) {
        replay.next_turn(turn);
    }
    let said = match (&step.act, player) {
        (Act::Call(call), Player::Caller(caller)) => Ok(caller.call(number, call).await),
        (Act::BreakHost { fault, hold_ms }, Player::Host(host)) => break_host(course, *host, *fault, *hold_ms).await,
        (Act::BreakImage { image, fault, hold_ms }, _) => Ok(break_image(course, *image, *fault, *hold_ms).await),
        (Act::BreakDaemon { daemon, fault, hold_ms }, Player::Daemons(daemons, entry)) => {
            break_daemon(course, daemons, entry, *daemon, *fault, *hold_ms).await
        }
        _ => Err(format!("{actor:?} cannot do that")),
    };
    let said = said.unwrap_or_else(|why| {
        course.report().failures.push(Finding { step: Some(number), what: why.clone(), excerpts: Vec::new() });
        why
    });
    course.journal.ended(number, course.weather.now(), &said);
}

/// Everything is mended, and every key deleted by key; the daemons, to be ended last.
async fn the_end(course: &Arc<Course>, players: Vec<Player>) -> Vec<Daemon> {
    for problem in mend_all(course).await {
        course.report().failures.push(Finding::at_the_end(problem));
    }
    let mut daemons = Vec::new();
    let mut deleting = JoinSet::new();
    for player in players {
        match player {
            Player::Caller(caller) => drop(deleting.spawn(delete_all(course.clone(), caller))),
            Player::Daemons(those, _) => daemons = those,
            Player::Host(_) | Player::Images => {}
        }
    }
    while let Some(done) = deleting.join_next().await {
        if let Err(e) = done {
            course.report().failures.push(Finding::at_the_end(format!("deleting ended: {e}")));
        }
    }
    daemons
}

async fn delete_all(course: Arc<Course>, mut caller: Caller) {
    for name in 0..NAMES {
        // a job of either daemon may still be at it
        for daemon in (0..DAEMONS).rev() {
            for uid in [Uid::A, Uid::B] {
                let started = Instant::now();
                loop {
                    let said = caller.delete(name, uid, Selector::Key, daemon, Patience::UntilDone).await;
                    // somebody else's is as good as absent, and goes with its own key
                    if said == "OK" || said.starts_with("UID_MISMATCH") {
                        break;
                    }
                    if started.elapsed() > DELETED_WITHIN {
                        let what = format!("name {name} of a caller cannot be deleted: {said}");
                        course.report().stuck.push(Finding::at_the_end(what));
                        break;
                    }
                    tokio::time::sleep(Duration::from_millis(500)).await;
                }
            }
        }
        // volumes that a hand left without a domain go only by the id
        if caller.beliefs()[name].may_have_volumes_only() {
            let said = caller.delete(name, Uid::A, Selector::Id, 0, Patience::UntilDone).await;
            if said != "OK" {
                course.report().stuck.push(Finding::at_the_end(format!("volumes of name {name} cannot be deleted: {said}")));
            }
        }
    }
}

/// Every failed call is held against what was broken while it went on.
fn judge(course: &Course) {
    let mut report = course.report();
    for suspect in std::mem::take(&mut report.suspects) {
        let weather = course.weather.between(suspect.from.saturating_sub(AFTERMATH), suspect.until);
        if !is_plausible(&suspect.failed, &weather) {
            let mut finding = suspect.finding;
            finding.what.push_str(&format!(" (from {} to {} ms; broken: {weather:?})", suspect.from, suspect.until));
            report.unclassified.push(finding);
        }
    }
}

/// Puts the daemons' logs beside the journal: the directory of the case goes.
fn keep_logs(course: &Course, report: &mut Report) {
    let all = [&mut report.unclassified, &mut report.violations, &mut report.leaks, &mut report.stuck, &mut report.failures];
    let mut findings: Vec<_> = all.into_iter().flatten().collect();
    for (n, log) in course.logs.iter().enumerate() {
        let kept = course.journal.path().with_extension(format!("d{n}.log"));
        if let Err(e) = std::fs::copy(log, &kept) {
            eprintln!("keeping {}: {e}", log.display());
            continue;
        }
        for excerpt in findings.iter_mut().flat_map(|f| f.excerpts.iter_mut()).filter(|e| &e.log == log) {
            excerpt.log.clone_from(&kept);
        }
    }
}
