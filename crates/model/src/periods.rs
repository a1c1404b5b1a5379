//! Freezing by schedule: training is cut into *periods*, in each of which other parameters are
//! trained. Gradual unfreezing trains from above one layer more in each (ULMFiT, Howard & Ruder
//! 2018, section 3.3); freezing from below stops with one layer more in each (FreezeOut, Brock et
//! al. 2017).
//!
//! A parameter that some period trains has gradients, a master and optimizer state for the whole
//! run. It *rests* in the periods that freeze it.

use crate::tuning::{Tuning, matches};
use crate::{ModelError, ParameterSpec, Result};

/// Some of the periods of a training.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Periods(u128);

impl Periods {
    /// The most periods of a training.
    pub const MAX: usize = 128;

    /// True if period `period` is one of them.
    pub fn has(self, period: usize) -> bool {
        period < Periods::MAX && self.0 >> period & 1 == 1
    }

    /// True if there are none.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Those of both.
    pub fn and(self, other: Periods) -> Periods {
        Periods(self.0 & other.0)
    }

    fn add(&mut self, period: usize) {
        self.0 |= 1 << period;
    }
}

impl Tuning {
    /// The tuning of a run that trains as this one does in period `period`, from its first step to
    /// its last.
    pub fn of_period(&self, period: usize) -> Tuning {
        Tuning { freeze_schedule: self.freeze_schedule.get(period).cloned().into_iter().collect(), ..self.clone() }
    }
}

/// The parameters of all units of a model, with their full names, in front of the schedule.
type Named<'a> = Vec<(String, &'a mut ParameterSpec)>;

/// Notes for each parameter in which periods it rests. What no period trains is frozen.
///
/// # Errors
/// More than [`Periods::MAX`] periods; a pattern that no trained parameter matches; a period that
/// trains nothing.
pub(crate) fn schedule(tuning: &Tuning, mut parameters: Named<'_>) -> Result<()> {
    let periods = &tuning.freeze_schedule;
    if periods.len() > Periods::MAX {
        let problem = format!("a schedule of {} periods: there may be {}", periods.len(), Periods::MAX);
        return Err(ModelError::Tuning(problem));
    }
    parameters.retain(|(_, parameter)| parameter.trained);
    for (period, patterns) in periods.iter().enumerate() {
        for pattern in patterns {
            let mut found = false;
            for (_, parameter) in parameters.iter_mut().filter(|(name, _)| matches(pattern, name)) {
                parameter.rests_in.add(period);
                found = true;
            }
            if !found {
                let names = parameters.iter().step_by(5).take(3).map(|(name, _)| name.as_str()).collect::<Vec<_>>();
                return Err(ModelError::Tuning(format!(
                    "the schedule of freezing: no parameter that is trained is called `{pattern}`: names are like {}",
                    names.join(", ")
                )));
            }
        }
        if parameters.iter().all(|(_, parameter)| parameter.rests_in.has(period)) {
            let problem = format!("the schedule of freezing: period {} trains nothing", period + 1);
            return Err(ModelError::Tuning(problem));
        }
    }
    for (name, parameter) in &mut parameters {
        if (0..periods.len()).all(|period| parameter.rests_in.has(period)) && !periods.is_empty() {
            if parameter.is_adapter() && periods.len() > 1 {
                return Err(ModelError::Tuning(format!(
                    "the schedule of freezing: no period trains the adapter `{name}`: choose with targets what has adapters"
                )));
            }
            (parameter.trained, parameter.rests_in) = (false, Periods::default());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::{Model, ModelSpec, Tuning, preset};

    fn model(periods: &[&[&str]]) -> Result<Model, String> {
        let spec = ModelSpec { layers: 2, dim: 32, heads: 4, kv_heads: 2, head_dim: 8, ..preset("llama-1b").unwrap() };
        let patterns = |period: &&[&str]| period.iter().map(|pattern| (*pattern).to_owned()).collect();
        let freeze_schedule = periods.iter().map(patterns).collect();
        let tuning = Tuning { freeze_schedule, ..Tuning::default() };
        Model::new(spec).unwrap().tuned(&tuning).map_err(|error| error.to_string())
    }

    #[test]
    fn what_some_period_trains_is_trained_and_rests_in_the_others() {
        let model = model(&[&["embedding.*", "block.*"], &["embedding.*", "block.0.*"], &["embedding.*"]]).unwrap();
        for (unit, (is_trained, rests)) in
            [(false, [false; 3]), (true, [true, true, false]), (true, [true, false, false]), (true, [false; 3])]
                .into_iter()
                .enumerate()
        {
            for parameter in model.units()[unit].parameters() {
                let found = [0, 1, 2].map(|period| parameter.rests_in.has(period));
                assert_eq!((parameter.trained, found), (is_trained, rests), "{}", parameter.name);
            }
        }
        // A run like its second period freezes what rests there.
        let second = model.tuning().of_period(1);
        let spec = model.spec().unwrap().clone();
        let alone = Model::new(spec).unwrap().tuned(&second).unwrap();
        let trained = |unit: usize| alone.units()[unit].parameters().iter().any(|parameter| parameter.trained);
        assert_eq!([0, 1, 2, 3].map(trained), [false, false, true, true]);
        assert!(alone.parameters().all(|(_, parameter)| parameter.rests_in.is_empty()));
    }

    #[test]
    fn schedules_that_cannot_be_are_refused() {
        let refused = |periods: &[&[&str]]| model(periods).err().unwrap();
        assert!(refused(&[&["blok.*"], &[]]).contains("`blok.*`"));
        assert!(refused(&[&[], &["*"]]).contains("period 2 trains nothing"));
        assert!(refused(&[&[][..]; 129]).contains("129 periods"));
    }
}
