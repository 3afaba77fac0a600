"""The converted checkpoint behind OpenAI's HTTP API: no stage, but Ray lives here like everywhere in `tasks`.

One file per concern: `settings` what a server is told, `protocol` the bodies of requests and errors, `asked` from a body to prompt and
decoding config, `worker` the engine's thread, `answers` the bodies of answers, `app` the routes, `limits` what is refused before any route,
`metrics` the names and numbers, `model` loading, `deployment` the replicas on Ray Serve. Decoding itself is `jacobi_core.serving`.
"""
