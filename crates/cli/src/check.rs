//! `check`: what does this kernel offer?

use std::process::ExitCode;

use serde_json::json;
use torpor_engine::Means;
use torpor_engine::check::{self, Category, Feature};
use torpor_worker::Report;

use crate::failure::Failure;
use crate::options::Settings;
use crate::{stats, work};

/// Checks what `settings` ask for.
///
/// # Errors
/// If there is no such feature, or something that is always needed is missing.
pub fn run(settings: &Settings) -> Result<ExitCode, Failure> {
    if settings.features.iter().any(|name| name == "list") {
        let names: Vec<&str> = check::FEATURES.iter().map(|feature| feature.name).collect();
        match settings.json {
            true => println!("{}", json!(names)),
            false => println!("{}", names.join(" ")),
        }
        return Ok(ExitCode::SUCCESS);
    }
    work::require_rights(settings)?;
    if !settings.features.is_empty() {
        return named(settings);
    }
    let wanted = |feature: &&Feature| match feature.category {
        Category::Required => true,
        Category::Extra => settings.check_extra,
        Category::Experimental => settings.check_experimental,
    };
    let mut missing = Vec::new();
    for feature in check::FEATURES.iter().filter(wanted) {
        if let Err(reason) = (feature.probe)() {
            report(feature, &reason);
            missing.push(feature);
        }
    }
    if settings.json {
        return Ok(told(&missing, settings));
    }
    if let Ok(means) = Means::of_this_kernel() {
        println!("Changes of memory are tracked by {}.", means.name());
    }
    Ok(conclude(&missing))
}

/// The end of a check, for programs.
fn told(missing: &[&Feature], settings: &Settings) -> ExitCode {
    if missing.is_empty() {
        stats::done(settings, Report::default);
        return ExitCode::SUCCESS;
    }
    let failure = Failure::unsupported(format!("missing: {}", names(missing)));
    stats::outcome(Err(failure)).print();
    ExitCode::FAILURE
}

fn names(features: &[&Feature]) -> String {
    features.iter().map(|feature| feature.name).collect::<Vec<_>>().join(", ")
}

fn report(feature: &Feature, reason: &str) {
    match feature.category {
        Category::Required => tracing::error!("{}: {reason}", feature.name),
        _ => tracing::warn!("{}: {reason}", feature.name),
    }
}

fn conclude(missing: &[&Feature]) -> ExitCode {
    let names = names(missing);
    if missing.is_empty() {
        println!("Looks good.");
        return ExitCode::SUCCESS;
    }
    if missing.iter().any(|feature| feature.category == Category::Required) {
        println!("Does not look good. Missing: {names}");
    } else {
        println!("Looks good but tasks that need these cannot be dumped or restored: {names}");
    }
    ExitCode::FAILURE
}

/// `--feature NAME`, which may be given several times.
fn named(settings: &Settings) -> Result<ExitCode, Failure> {
    for name in &settings.features {
        let feature = check::find(name).ok_or_else(|| {
            Failure::invalid(format!("there is no feature {name}"))
                .hint("check --feature list prints the names")
        })?;
        (feature.probe)().map_err(|reason| Failure::unsupported(format!("{name}: {reason}")))?;
        if !settings.json {
            println!("{name} is supported");
        }
    }
    stats::done(settings, Report::default);
    Ok(ExitCode::SUCCESS)
}
