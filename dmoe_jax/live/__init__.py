"""A swarm as a page in the browser shows it: now, as it was recorded, or from a run's folder (`dmoe watch`).

A *state* is plain JSON: totals, peers with their experts' load, groups, news. `snapshot` makes it of what a swarm's
members say of themselves, `run_states` of a run's records. States travel as *events*, one JSON object in a line
(`events`): the whole state first, then what has changed. The same lines go to browsers as server-sent events (`feeds`,
`server`) and into `watch.jsonl` (`recording`), so that the page needs to know one form only. What strangers say is
checked in `snapshot` and shown as text, never as markup.
"""
