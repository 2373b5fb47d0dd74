//! Ranks that join, disagree, come late or never, over real sockets.
use super::*;

fn launch(rank: usize, size: usize, endpoint: Endpoint, token: &RunToken) -> Launch {
    let world = World { rank, size, local_rank: rank, local_size: size };
    Launch { launcher: "test", world, endpoint, token: Some(token.clone()) }
}

fn host() -> (Host, RunToken) {
    let token = RunToken::fresh().unwrap();
    (Host::serve(SocketAddr::from(([127, 0, 0, 1], 0)), token.clone()).unwrap(), token)
}

fn held(host: &Host) -> Endpoint {
    Endpoint::Launcher(host.address().to_string())
}

/// What comes of ranks that come at the same time.
fn joined(launches: Vec<(Launch, Facts)>) -> Vec<Result<Rendezvous>> {
    let join = |(launch, facts)| std::thread::spawn(move || Rendezvous::join(&launch, facts, Wait::default()));
    let running: Vec<_> = launches.into_iter().map(join).collect();
    running.into_iter().map(|rank| rank.join().unwrap()).collect()
}

fn rendezvous(size: usize) -> (Host, Vec<Rendezvous>) {
    let (host, token) = host();
    let launches = (0..size).map(|rank| (launch(rank, size, held(&host), &token), Facts::new())).collect();
    (host, joined(launches).into_iter().map(Result::unwrap).collect())
}

/// A free port, for rank 0 to listen on.
fn free() -> String {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

#[test]
fn ranks_that_do_not_fit_together_all_hear_of_both_sides() {
    let token = RunToken::fresh().unwrap();
    let facts = |version: &str| Facts::from([("version".to_owned(), version.to_owned())]);
    let both = |launches: Vec<(Launch, Facts)>, named: &[&str]| {
        let began = Instant::now();
        for (rank, joined) in joined(launches).into_iter().enumerate() {
            let error = joined.unwrap_err();
            assert_eq!(error.kind(), tunesmith_base::Kind::Config, "{error}");
            for part in named {
                assert!(error.message().contains(part), "rank {rank}: {error}");
            }
        }
        assert!(began.elapsed() < Duration::from_secs(14), "{:?}", began.elapsed());
    };
    // The world's size, whoever holds the rendezvous.
    let place = Endpoint::RankZero(free());
    let sizes = [(0, 2), (1, 3), (2, 3)];
    let launches = sizes.map(|(rank, size)| (launch(rank, size, place.clone(), &token), Facts::new()));
    both(launches.to_vec(), &["world size: ", "2 on rank 0", "3 on rank "]);
    let (host, held_token) = host();
    let versions = ["1.0", "1.0", "2.0"];
    let launches = (0..3).map(|rank| (launch(rank, 3, held(&host), &held_token), facts(versions[rank])));
    both(launches.collect(), &["version: ", "1.0 on rank ", "2.0 on rank 2"]);
    // One that has been started twice.
    let place = Endpoint::RankZero(free());
    let launches = [0, 1, 1].map(|rank| (launch(rank, 3, place.clone(), &token), Facts::new()));
    both(launches.to_vec(), &["rank 1 connected twice: rank 1 (process "]);
    // Another token: the one that has it and those that wait for it.
    let other = RunToken::fresh().unwrap();
    let place = Endpoint::RankZero(free());
    let launches = [(0, &token), (1, &other), (2, &token)]
        .map(|(rank, token)| (launch(rank, 3, place.clone(), token), Facts::new()));
    both(launches.to_vec(), &["token", "rank 1"]);
}

#[test]
fn a_failure_names_who_has_ended_and_who_is_silent() {
    let (_host, mut all) = rendezvous(3);
    let last = all.pop().unwrap();
    let second = all.pop().unwrap();
    let first = all.pop().unwrap();
    let other = std::thread::spawn(move || second.find_failed("all_gather"));
    assert_eq!(first.find_failed("all_gather"), "rank 2 did not answer");
    assert_eq!(other.join().unwrap(), "rank 2 did not answer");
    drop(last);
    let began = Instant::now();
    assert_eq!(first.find_failed("all_gather"), "rank 2 ended");
    assert!(began.elapsed() < FAILURE_REPORTS);
}

#[test]
fn the_first_of_a_machine_goes_first() {
    let (_host, all) = rendezvous(2);
    let [first, second] = <[Rendezvous; 2]>::try_from(all).unwrap();
    let through = std::thread::spawn(move || second.wait().is_ok());
    std::thread::sleep(Duration::from_millis(30));
    assert!(!through.is_finished());
    first.release().unwrap();
    assert!(through.join().unwrap());
    assert_eq!(ranks(&[1, 2, 5]), "ranks 1, 2 and 5");
}

#[test]
fn rank_0_holds_the_rendezvous_where_the_launcher_only_names_a_port() {
    let (token, place) = (RunToken::fresh().unwrap(), Endpoint::RankZero(free()));
    let launches = [1, 0].map(|rank| (launch(rank, 2, place.clone(), &token), Facts::new()));
    let ranks: Vec<Rendezvous> = joined(launches.to_vec()).into_iter().map(Result::unwrap).collect();
    ranks[1].store.set("x", b"y").unwrap();
    assert_eq!(ranks[0].store.wait("x", None).unwrap(), b"y");
}

#[test]
fn a_rank_of_an_earlier_run_finds_a_complete_one_and_changes_nothing() {
    let (host, token) = host();
    let all = joined((0..2).map(|rank| (launch(rank, 2, held(&host), &token), Facts::new())).collect());
    let began = Instant::now();
    let late = Rendezvous::join(&launch(1, 2, held(&host), &token), Facts::new(), Wait::default()).unwrap_err();
    assert!(began.elapsed() < Duration::from_secs(14));
    assert!(late.message().contains("all 2 ranks of its run are connected, including rank 1 (process"), "{late}");
    assert!(all[0].as_ref().unwrap().store.members().unwrap().1.is_empty(), "nobody has gone");
}

#[test]
fn whoever_is_missing_is_named_when_the_time_is_over() {
    let (token, place) = (RunToken::fresh().unwrap(), Endpoint::RankZero(free()));
    for (rank, missing) in [(1, "rank 0 did not come within 6 s"), (0, "rank 1 did not connect to 127.0.0.1:")] {
        let told = std::cell::RefCell::new(Vec::new());
        let say = |text: &str| told.borrow_mut().push(text.to_owned());
        let wait = Wait { limit: Duration::from_secs(6), say: &say };
        let began = Instant::now();
        let error = Rendezvous::join(&launch(rank, 2, place.clone(), &token), Facts::new(), wait).unwrap_err();
        assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
        assert!(error.kind() == tunesmith_base::Kind::Peer && error.message().contains(missing), "{error}");
        let told = told.borrow();
        assert_eq!(told.len(), 1, "{told:?}");
        assert!(told[0].starts_with(&format!("waiting for rank {} at 127.0.0.1:", 1 - rank)), "{told:?}");
    }
}

#[test]
fn who_holds_the_port_and_says_nothing_is_named_within_a_quarter_of_a_minute() {
    let mute = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let place = Endpoint::RankZero(mute.local_addr().unwrap().to_string());
    let token = RunToken::fresh().unwrap();
    let began = Instant::now();
    let busy = Rendezvous::join(&launch(0, 2, place.clone(), &token), Facts::new(), Wait::default()).unwrap_err();
    assert!(busy.message().contains("cannot listen on 127.0.0.1:") && began.elapsed() < Duration::from_secs(5));
    let error = Rendezvous::join(&launch(1, 2, place, &token), Facts::new(), Wait::default()).unwrap_err();
    assert!(began.elapsed() < Duration::from_secs(14), "{:?}", began.elapsed());
    assert_eq!(error.kind(), tunesmith_base::Kind::Peer);
    assert!(error.message().contains("sends nothing"), "{error}");
}
