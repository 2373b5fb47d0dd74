//! Whether the files of a run are still what it made of them. Others may remove or replace them while it goes; a run that
//! learnt of it at its end would have lost hours, or its metrics.
use super::output;
use super::session::Session;
use tunesmith_base::files;

/// Why a run stops one of whose files was removed or replaced.
pub const DISPLACED: &str = "a file of the run was removed or replaced";

impl Session<'_> {
    /// Looks for something in the place of the run's files. Where it finds it the run is asked to stop: the state is saved,
    /// as checkpoints have folders of their own.
    pub fn mind_its_files(&mut self) {
        self.displaced = self.displaced.take().or_else(|| self.find_displaced());
        if self.displaced.is_some() {
            self.stop.request(DISPLACED);
        }
    }

    /// What is wrong with the first of them.
    fn find_displaced(&self) -> Option<String> {
        let lock = self.prepared.lock.as_ref()?;
        let output_dir = &self.prepared.config.train.output_dir;
        let stands = output::FILES.into_iter().find_map(|name| {
            let path = output_dir.join(name);
            let found = files::obstacle(&path)?;
            Some(format!("{found} stands at {}, where the run keeps a regular file", path.display()))
        });
        let gone = || {
            let metrics = self.metrics.as_ref().filter(|metrics| !metrics.is_in_place())?;
            Some(format!("{} was removed or replaced while the run wrote to it", metrics.path().display()))
        };
        // Where the whole directory has gone meanwhile, that is the news.
        stands.or_else(gone).filter(|_| lock.is_there())
    }
}
