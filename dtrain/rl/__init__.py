"""Rollouts and their rewards, for GRPO, on-policy distillation and evaluations. README.md explains them.

grpo                            method grpo
on_policy                       method distill with completions of the student
rollouts                        rollouts as the source of a method's batches
collect                         a rollout: prompts become scored completions; its engine and rewards
samples                         a sampled completion
rewards                         functions that score completions
environments                    completions of several turns
remote                          servers that sample completions; another model as a judge
tools                           schemas of functions that a model may call
checks                          problems of a section's rewards, environments and tools
evaluation                      questions become answers with rewards
routed                          routed experts on the wire
worker                          user code in a process of its own, from outside and inside
"""
