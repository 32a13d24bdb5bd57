"""Rollouts and their judges: for GRPO, on-policy distillation and judged evaluation. README.md explains them.

grpo                            method grpo
on_policy                       method distill with completions of the student
rollouts                        rollouts as the source of a method's batches
collect                         a rollout: prompts to judged completions; its engine and rewards
samples                         a sampled completion
rewards                         functions that judge completions
environments                    completions in several turns
remote                          servers that draw completions; another model as a judge
tools                           schemas of functions that a model may call
checks                          what is wrong with a section's rewards, environments and tools
evaluation                      questions to answers and their rewards
routed                          experts that tokens went to, on the wire
worker                          the user's code in a process of its own, from outside and inside
"""
