//! A rank's parameters and gradients: one flat buffer per unit and role, parameters being views into it.

use crate::{EngineError, Result};
use trainyard_autograd::{AutogradError, GradientTarget, Gradients, ParamId, Parameter, Parameters};
use trainyard_model::{Init, Model, UnitLayout};
use trainyard_tensor::cpu::philox::{self, RandomKey};
use trainyard_tensor::{DType, Device, Purpose, Tensor, ops};

/// The parameters of every unit, in f32 and in the dtype that forward reads.
pub struct ParameterState {
    compute: DType,
    units: Vec<UnitParameters>,
}

/// One unit's parameters.
pub struct UnitParameters {
    layout: UnitLayout,
    /// f32, flat.
    master: Tensor,
    /// In the compute dtype, flat; None when that is f32, and forward reads the master.
    copy: Option<Tensor>,
    /// What forward reads, parameter by parameter.
    views: Vec<Parameter>,
}

impl ParameterState {
    /// Parameters of `model` with initial values drawn from `seed`: each a function of (seed, unit, index, element).
    pub fn new(device: &Device, model: &Model, compute: DType, seed: u64) -> Result<ParameterState> {
        let mut state = ParameterState::zeros(device, model, compute)?;
        for (id, spec) in model.parameters() {
            let mut view = state.master(id, &spec.shape)?;
            let site = (id.unit << 16) | id.index;
            initialise(&mut view, spec.init, RandomKey { seed, step: RandomKey::INIT, site })?;
        }
        state.refresh_copies()?;
        Ok(state)
    }

    /// Parameters that are all zero, to be loaded.
    pub fn zeros(device: &Device, model: &Model, compute: DType) -> Result<ParameterState> {
        let units = (0..model.units().len()).map(|unit| UnitParameters::allocate(device, model, unit, compute));
        Ok(ParameterState { compute, units: units.collect::<Result<_>>()? })
    }

    /// The f32 values of a parameter, in `shape`.
    pub fn master(&self, id: ParamId, shape: &[usize]) -> Result<Tensor> {
        let unit = &self.units[id.unit as usize];
        Ok(unit.master.view(unit.layout.range(id.index as usize).start, shape)?)
    }

    /// Writes every compute copy anew, after masters were changed from outside (loading).
    pub fn refresh_copies(&mut self) -> Result<()> {
        for unit in &mut self.units {
            if let Some(copy) = &mut unit.copy {
                ops::cast_into(&unit.master, copy)?;
            }
        }
        Ok(())
    }

    /// One unit's.
    pub fn unit(&self, unit: usize) -> &UnitParameters {
        &self.units[unit]
    }

    /// The dtype that forward reads.
    pub fn compute(&self) -> DType {
        self.compute
    }
}

impl UnitParameters {
    fn allocate(device: &Device, model: &Model, unit: usize, compute: DType) -> Result<UnitParameters> {
        let specs = model.units()[unit].parameters();
        let layout = UnitLayout::new(specs, 1);
        let master = device.zeros([layout.elements()], DType::F32, Purpose::Params)?;
        let copy =
            (compute != DType::F32).then(|| device.zeros([layout.elements()], compute, Purpose::Params)).transpose()?;
        let read = copy.as_ref().unwrap_or(&master);
        let views = specs
            .iter()
            .enumerate()
            .map(|(index, spec)| {
                let value = read.view(layout.range(index).start, &spec.shape)?;
                Ok(Parameter { value, trained: true })
            })
            .collect::<Result<Vec<_>>>()?;
        Ok(UnitParameters { layout, master, copy, views })
    }

    /// Where its parameters lie.
    pub fn layout(&self) -> &UnitLayout {
        &self.layout
    }

    /// Elements `range` of the flat masters.
    pub fn master_range(&self, range: std::ops::Range<usize>) -> Result<Tensor> {
        Ok(self.master.view(range.start, [range.len()])?)
    }

    /// Elements `range` of the flat compute copy; None when forward reads the masters.
    pub fn copy_range(&self, range: std::ops::Range<usize>) -> Result<Option<Tensor>> {
        Ok(self.copy.as_ref().map(|copy| copy.view(range.start, [range.len()])).transpose()?)
    }
}

impl Parameters for ParameterState {
    fn parameter(&self, id: ParamId) -> Result<Parameter, AutogradError> {
        let unit = self.units.get(id.unit as usize);
        let view = unit.and_then(|unit| unit.views.get(id.index as usize));
        view.cloned().ok_or(AutogradError::NoParameter(id))
    }
}

fn initialise(view: &mut Tensor, init: Init, key: RandomKey) -> Result<()> {
    let device = view.device().clone();
    let Some(cpu) = device.as_cpu() else { return Ok(()) };
    let values = view.data_mut::<f32>()?;
    match init {
        Init::Zeros => values.fill(0.0),
        Init::Ones => values.fill(1.0),
        Init::Normal { std } => philox::fill_normal(cpu, key, 0, 0.0, std, values),
    }
    Ok(())
}

/// The gradients of every unit, f32 and flat.
pub struct GradientState {
    units: Vec<UnitGradients>,
}

/// One unit's gradients.
pub struct UnitGradients {
    layout: UnitLayout,
    flat: Tensor,
    shapes: Vec<Vec<usize>>,
    /// Whether a parameter's gradient has been written in this step; the first contribution overwrites, so that nothing needs
    /// zeroing.
    written: Vec<bool>,
}

impl GradientState {
    /// Zero gradients for `model`.
    pub fn new(device: &Device, model: &Model) -> Result<GradientState> {
        let unit = |unit: &dyn trainyard_model::Unit| {
            let specs = unit.parameters();
            let layout = UnitLayout::new(specs, 1);
            let flat = device.zeros([layout.elements()], DType::F32, Purpose::Grads)?;
            let shapes = specs.iter().map(|spec| spec.shape.clone()).collect();
            Ok(UnitGradients { layout, flat, shapes, written: vec![false; specs.len()] })
        };
        Ok(GradientState { units: model.units().iter().map(|u| unit(u.as_ref())).collect::<Result<_>>()? })
    }

    /// No gradients, for what does not train.
    pub fn none() -> GradientState {
        GradientState { units: Vec::new() }
    }

    /// Begins a step: every gradient counts as zero.
    pub fn begin_step(&mut self) {
        for unit in &mut self.units {
            unit.written.fill(false);
        }
    }

    /// Ends the backwards of a step: gradients that nothing reached are zeroed.
    pub fn end_backward(&mut self) -> Result<()> {
        for unit in &mut self.units {
            for index in 0..unit.written.len() {
                if !std::mem::replace(&mut unit.written[index], true) {
                    unit.view(index)?.fill_zero();
                }
            }
        }
        Ok(())
    }

    /// The sum of squares of all gradients, units in order.
    pub fn sum_of_squares(&self) -> Result<f64> {
        let mut sum = 0.0;
        for unit in &self.units {
            sum += ops::optim::sum_of_squares(&unit.flat)?;
        }
        Ok(sum)
    }

    /// Elements `range` of a unit's flat gradients.
    pub fn range(&self, unit: usize, range: std::ops::Range<usize>) -> Result<Tensor> {
        Ok(self.units[unit].flat.view(range.start, [range.len()])?)
    }
}

impl UnitGradients {
    fn view(&self, index: usize) -> Result<Tensor, trainyard_tensor::TensorError> {
        self.flat.view(self.layout.range(index).start, &self.shapes[index])
    }
}

impl Gradients for GradientState {
    fn target(&mut self, id: ParamId) -> Result<Option<GradientTarget>, AutogradError> {
        let unit = self.units.get_mut(id.unit as usize).ok_or(AutogradError::NoParameter(id))?;
        let written = unit.written.get_mut(id.index as usize).ok_or(AutogradError::NoParameter(id))?;
        let overwrite = !std::mem::replace(written, true);
        Ok(Some(GradientTarget { tensor: unit.view(id.index as usize)?, overwrite }))
    }
}

/// A checkpoint or a weight file does not fit the model.
pub(crate) fn does_not_fit(what: impl Into<String>) -> EngineError {
    EngineError::DoesNotFit(what.into())
}
