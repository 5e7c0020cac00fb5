// The rules, one line each. Codes, names and properties of rules in C++ and in efla.scans.backends.native come from here.
//
// efla.rules has the same properties as class attributes, because users write rules too. The two are compared when
// efla.scans.backends.native is imported, which fails if they disagree.
//
// To add a rule to the kernels: a line here, its formula and gradient in kernels/rules.h, its class in src/efla/rules.
// Plain data only, for the reason given in problem.h.
#pragma once

namespace efla {

// needs_beta, needs_gate    whether the rule takes beta, log_gate
// has_decay, has_erase      whether its log_decay, its erase can differ from zero
// uses_norm                 whether its coefficients depend on lam = k.k
// clang-format off
#define EFLA_RULES(RULE) \
  /*   name            needs_beta needs_gate has_decay has_erase uses_norm */ \
  RULE(linear,         false,     false,     false,    false,    false)       \
  RULE(ssd,            true,      true,      true,     false,    false)       \
  RULE(delta,          true,      false,     false,    true,     false)       \
  RULE(rk2,            true,      false,     false,    true,     true)        \
  RULE(rk4,            true,      false,     false,    true,     true)        \
  RULE(implicit_euler, true,      false,     false,    true,     true)        \
  RULE(crank_nicolson, true,      false,     false,    true,     true)        \
  RULE(efla,           true,      false,     false,    true,     true)        \
  RULE(gated_delta,    true,      true,      true,     true,     false)       \
  RULE(gated_efla,     true,      true,      true,     true,     true)        \
  RULE(gated_efla_log, true,      true,      true,     true,     true)
// clang-format on

#define EFLA_RULE_CODE(name, ...) name,
#define EFLA_RULE_FACTS(name, ...) {#name, __VA_ARGS__},

enum class Rule : int {
  raw = -1,  // no rule: the caller passes log_decay, erase and write
  EFLA_RULES(EFLA_RULE_CODE)
};

struct RuleFacts {
  const char* name;
  bool needs_beta, needs_gate, has_decay, has_erase, uses_norm;
};

constexpr RuleFacts kRules[] = {EFLA_RULES(EFLA_RULE_FACTS)};  // by code
constexpr RuleFacts kRaw = {"raw", false, false, true, true, false};
constexpr int kRuleCount = sizeof(kRules) / sizeof(kRules[0]);

#undef EFLA_RULE_CODE
#undef EFLA_RULE_FACTS

}  // namespace efla
